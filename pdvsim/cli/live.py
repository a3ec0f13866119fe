"""`pdvsim live`: architectures on one page while they serve."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.common.presets import ExperimentOptions
from pdvsim.sim.config import Acceptance, Arch
from pdvsim.sim.limits import Range, Redefined, RequestRate, Share

if TYPE_CHECKING:
    from pdvsim.live.server import PageServer
    from pdvsim.live.session import Setup

PERCENTILES = (50.0, 95.0, 99.0)
EXTRA = "live needs tornado: pip install 'pdvsim[live]'"


@dataclass(frozen=True)
class LiveCommand(Command, ExperimentOptions):
    """Show one to four architectures on a page while they serve the same requests; change load and settings live."""

    without: ClassVar[tuple[str, ...]] = (
        "num_prompts", "use_trace_timestamps", "window", "metric_percentiles", "warmup_requests", "detailed", "band",
        "acceptance_from", "json",
    )  # fmt: skip

    arch: tuple[Arch, ...] = ("colocated", "pdv")
    """One to four serving architectures; differences are relative to the first."""
    speed: Annotated[float, Range(0.01, 1e6, or_inf=True)] = 1.0
    """Initial speed, in simulated seconds per second: 1, 10, 100, or inf for the maximum."""
    port: Annotated[int, Range(0, 65_535)] = 5006
    """Port of the page; 0: any free port."""
    address: str | None = None
    """Network address to serve the page on; default: this machine only. Access then needs a token, which is printed."""
    token: str | None = None
    """Access token; default: a random one."""
    browser: bool = True
    """Open no browser, only print the address of the page."""
    request_rate: Redefined[RequestRate] = 8.0
    """Requests per second at the start; it can be changed on the page."""
    acceptance_rate: Redefined[Share] = Acceptance.acceptance_rate

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token is not None and len(self.token) < 8:
            raise ValueError("token must have at least 8 characters")

    def setup(self) -> Setup:
        """The session these options describe."""
        from pdvsim.live.session import Setup

        if not self.arch:
            raise ValueError("arch needs at least one value")
        return Setup(self.arch, self.experiment(self.arch[0]).with_settings(metric_percentiles=PERCENTILES))

    def execute(self) -> int:
        try:
            from pdvsim.live.server import PageServer
        except ImportError:
            raise ValueError(EXTRA) from None
        page = PageServer(self.address, self.port, self.token)  # reports a port in use before anything else
        try:
            self._serve(page)
        finally:
            page.close()
        say("pdvsim", "live ended")
        return 0

    def _serve(self, page: PageServer) -> None:
        from pdvsim.cli.livefiles import saved
        from pdvsim.live.page import Dashboard
        from pdvsim.sim.assembly import covering_profile

        setup = self.setup()
        profile = covering_profile(setup.base)
        about = f"{setup.base.server.pair} on {profile.gpu.name}, profile {profile.name}: {profile.foundation}"

        def ready() -> None:
            say("pdvsim", f"live at {page.url} (stop with Ctrl-C)")
            if self.browser:
                webbrowser.open(page.url)

        page.run(Dashboard(setup, self.speed, saved, about), ready)
