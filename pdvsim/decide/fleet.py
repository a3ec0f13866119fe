"""The same GPUs used otherwise: replicas of a whole server, or one server with its lanes on several of them.

A fleet is a number of GPUs, an architecture, and who is where. Fleets of the same size compete, each at its own best
settings (`tune`), on the same requests: so a lane that gets a GPU of its own is held against a second server. Prices of
cards make it a contest by the dollar; without them every GPU costs the same. By the dollar one GPU alone competes, too.

Not among them: tensor parallelism, which is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdvsim.decide.runs import Bench
from pdvsim.decide.tune import Search, tuned
from pdvsim.sim.config import PLACED, Arch, Experiment, Hardware
from pdvsim.sim.hardware.cards import GPUS
from pdvsim.sim.hardware.names import card_name
from pdvsim.sim.limits import RANGES, check
from pdvsim.sim.policies import kin

ARCHS: tuple[Arch, ...] = ("autoregressive", "colocated", "pd", "pdv", "pdv-ahead")  # where none is named
APART = {"pd": ("decode=1",), "pdv": ("prefill=1", "decode=0", "verify=1")}  # one lane's GPU, and the others'


@dataclass(frozen=True)
class Fleet:
    """Some GPUs, and how they are used."""

    name: str
    arch: Arch
    hardware: Hardware

    def of(self, place: Experiment) -> Experiment:
        """The experiment on this fleet."""
        return replace(place, arch=self.arch, hardware=self.hardware)

    def cards(self, place: Experiment) -> tuple[str, ...]:
        """Every GPU of it."""
        server = self.hardware.cards or (self.hardware.gpu,) * self.of(place).seats.gpus
        return server * self.hardware.replicas

    @property
    def splits(self) -> bool:
        """Whether its servers have their lanes on several GPUs."""
        return bool(self.hardware.place)


def fleets(
    base: Experiment, archs: Sequence[Arch], gpus: int, drafter_card: str | None = None, alone: bool = False
) -> tuple[Fleet, ...]:
    """Every way to use so many GPUs with these architectures; with a cheaper card for the drafter, that as well.

    An architecture whose lanes are workers of their own is replicated, and also has them on two GPUs; one that drafts
    ahead is not replicated, as on one GPU it has nothing to gain. A head or an n-gram search stays with its target, and
    such servers are replicated alone. Where cost counts, one GPU `alone` competes too.
    """
    given = base.hardware
    if gpus < 2:
        raise ValueError(f"gpus must be at least 2 for fleets to differ, got {gpus}")
    if given.place or given.verify_gpu or given.cards or given.replicas > 1:
        raise ValueError("--gpus places lanes itself: leave out --place, --verify-gpu, --cards and --replicas")
    if given.profile and drafter_card is not None and given.profile != "roofline":
        raise ValueError("--drafter-card takes the built-in profile of each card: leave out --profile")
    router = "least-loaded" if given.router == Hardware.router else given.router

    def copies(hardware: Hardware, count: int) -> Hardware:
        return replace(hardware, replicas=count, router=router) if count > 1 else hardware

    found: list[Fleet] = []
    for arch in archs:
        kind = kin(arch)
        if kind != "pdv-ahead":
            if alone:
                found.append(Fleet(f"1x {arch}", arch, given))
            found.append(Fleet(f"{gpus}x {arch}", arch, copies(given, gpus)))
        if kind not in PLACED or gpus % 2 or base.server.drafted_by not in ("model", "none"):
            continue
        place = APART["pd" if kind == "pd" else "pdv"]
        split = copies(replace(given, place=place), gpus // 2)
        times = "" if gpus == 2 else f"{gpus // 2}x "
        found.append(Fleet(f"{times}{arch} on 1+1", arch, split))
        if drafter_card is not None and kind != "pd":
            card = card_name(drafter_card, GPUS)
            mixed = replace(split, cards=(card, given.gpu))
            found.append(Fleet(f"{times}{arch} on {card}+1", arch, mixed))
    if drafter_card is not None and not any(fleet.hardware.cards for fleet in found):
        raise ValueError("--drafter-card needs an architecture that drafts on a GPU of its own: pdv or pdv-ahead")
    if len(found) < 2:
        raise ValueError("--gpus needs at least two ways to use them")
    return tuple(found)


def prices(texts: Sequence[str]) -> dict[str, float]:
    """Dollars an hour by card, of card=price; a ValueError names what is wrong."""
    found: dict[str, float] = {}
    for text in texts:
        card, _, price = text.partition("=")
        name = card_name(card, GPUS)
        try:
            found[name] = float(price)
        except ValueError:
            raise ValueError(f"card-hour-usd: {text!r} must be card=price, e.g. h200=4.5") from None
        check(f"card-hour-usd {name}", found[name], RANGES["gpu_hour_usd"])
    return found


def hourly(fleet: Fleet, place: Experiment, usd: Mapping[str, float]) -> float:
    """What a fleet costs an hour; without prices, its GPUs, if they are all alike."""
    cards = fleet.cards(place)
    if not usd and len(set(cards)) == 1 and cards[0] == place.hardware.gpu:
        return float(len(cards))
    missing = [card for card in dict.fromkeys(cards) if card not in usd]
    if missing:
        raise ValueError(f"card-hour-usd has no price for {missing[0]}: give --card-hour-usd {missing[0]}=...")
    return sum(usd[card] for card in cards)


def tuned_fleets(
    search: Search, ways: Sequence[Fleet], places: Sequence[Experiment], bench: Bench
) -> list[dict[str, Experiment]]:
    """For each place every fleet at its own best settings, by name; what is left of a budget is shared out evenly."""
    found: list[dict[str, Experiment]] = [{} for _ in places]
    for at, fleet in enumerate(ways):
        budget = search.budget
        if budget is not None:
            budget = bench.runs + max(0, budget - bench.runs) // (len(ways) - at)
        space = replace(search.space, archs=(fleet.arch,))
        mine = Search(search.goal, space, search.warmup_share, search.indifference, budget)
        for here, best in zip(found, tuned(mine, [fleet.of(place) for place in places], bench), strict=True):
            here[fleet.name] = best[fleet.arch]
        search.skipped += mine.skipped
        search.figures |= mine.figures
    return found
