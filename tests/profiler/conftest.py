"""Models this small are slower on several threads than on one."""

import torch

torch.set_num_threads(1)
