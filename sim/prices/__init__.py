"""What launches cost: cards, links, kernels, power, contention, profiles."""
