"""A frontier as a picture: the first token across, the others up, the service levels drawn in."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pdvsim.decide.figures import across, upper
from pdvsim.decide.frontier import Frontier, FrontierPoint, metric_text
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.setting import run_seeds, setting_line
from pdvsim.view.style import GREEN, arch_colour, arch_marker, paler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAR_APART = 5.0  # ends of an axis, as a ratio; beyond that it is in logarithms
NEAR = 1.5  # times the furthest figure: a service level beyond that is not in the frame
LABEL_APART = 9.0  # typographic points; nearer points of one architecture share a label


def frontier_figure(found: Frontier) -> Figure:
    """A marker a point with its chunk and intervals, pale where it is dominated; the frontier as a stair."""
    from matplotlib.lines import Line2D

    question = found.question
    shown = found.those("frontier", "not told apart", "dominated")
    archs = [arch for arch in question.space.archs if any(point.candidate.arch == arch for point in shown)]
    with styled():
        figure = new_figure(9.5, 6.2, _frontier_note(found))
        axes = figure.subplots()
        levels = [question.goal.levels_ms.get(metric.split("_")[1]) for metric in (question.x, question.y)]
        _frame_points(axes, shown, levels)
        _draw_levels(axes, levels)
        stair = found.those("frontier")
        if stair:  # what is on the stair or above it can be had: it goes on to the frame, up and to the right
            (_, right), (_, top) = axes.get_xlim(), axes.get_ylim()
            x, y = [point.x.mean for point in stair], [point.y.mean for point in stair]
            axes.step([x[0], *x, right], [top, *y, y[-1]], where="post", color="0.25", linewidth=1.8, zorder=2)
        for arch in archs:
            mine = sorted((point for point in shown if point.candidate.arch == arch), key=lambda point: point.chunk)
            x, y = [point.x.mean for point in mine], [point.y.mean for point in mine]
            axes.plot(x, y, color=paler(arch_colour(arch), 0.4), linewidth=1, linestyle=":", zorder=2)
        for point in shown:
            first, pale = point.verdict == "frontier", point.verdict == "dominated"
            x_bar, y_bar = (0.0 if math.isnan(v.half_width) else v.half_width for v in (point.x, point.y))
            axes.errorbar(
                point.x.mean, point.y.mean, y_bar, x_bar,
                color=paler(arch_colour(point.candidate.arch), 0.55 if pale else 0),
                marker=arch_marker(point.candidate.arch), markersize=10, markeredgecolor="0.1" if first else "white",
                markeredgewidth=1.2, elinewidth=1.2, capsize=3, zorder=5 if first else 3 if pale else 4,
            )  # fmt: skip
        axes.set_xlabel(metric_text(question.x).replace(" ms", " (ms)"))
        axes.set_ylabel(metric_text(question.y).replace(" ms", " (ms)"))
        unit = "req/s" if question.load_kind == "request_rate" else "requests at once"
        axes.set_title(f"First token against the others at {question.load:g} {unit}", fontweight="bold", loc="left")
        handles = [
            Line2D([], [], color=arch_colour(arch), marker=arch_marker(arch), markersize=9, linestyle=":", label=arch)
            for arch in archs
        ]
        handles.append(Line2D([], [], color="0.25", linewidth=1.8, label="frontier"))
        figure.legend(handles=handles, loc="outside upper center", ncols=across(figure) + 1, frameon=False)
        _label_chunks(axes, shown)
    return figure


def _frame_points(axes: Axes, shown: list[FrontierPoint], levels: list[float | None]) -> None:
    """Axes around the intervals, and the service levels that are near them; in logarithms where they reach far."""
    from matplotlib.ticker import LogLocator

    for axis, values, level, scale, limits in (
        (axes.xaxis, [point.x for point in shown], levels[0], axes.set_xscale, axes.set_xlim),
        (axes.yaxis, [point.y for point in shown], levels[1], axes.set_yscale, axes.set_ylim),
    ):
        # two replications make intervals without end
        ends = [end for v in values for end in (v.mean, min(upper(v), 1.5 * v.mean), max(2 * v.mean - upper(v), 0))]
        low, high = min(ends, default=0.0), max(ends, default=level or 1.0)
        if level is not None and low / NEAR <= level <= NEAR * high:
            low, high = min(low, level), max(high, level)
        if 0 < low < high / FAR_APART:
            scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            limits(low / 1.2, high * 1.2)
        else:
            room = 0.1 * (high - low) or 0.1 * high or 1.0
            limits(max(0.0, low - room), high + room)
    axes.minorticks_off()


def _draw_levels(axes: Axes, levels: list[float | None]) -> None:
    """The service levels as lines, and what is within them shaded; one beyond the frame is named at its edge."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    across_ms, up_ms = levels
    if across_ms is None and up_ms is None:
        return
    inside_x, inside_y = min(right, across_ms or right), min(top, up_ms or top)
    if inside_x > left and inside_y > bottom:
        axes.fill_between([left, inside_x], bottom, inside_y, color=paler(GREEN, 0.88), linewidth=0, zorder=0)
    for name, level, low, high, line, arrows in (
        ("TTFT", across_ms, left, right, axes.axvline, "←→"),
        ("TPOT", up_ms, bottom, top, axes.axhline, "↓↑"),
    ):
        if level is None:
            continue
        text = f"{name} ≤ {level:g} ms"
        if low <= level <= high:
            line(level, color=GREEN, linewidth=1.4, linestyle="--", zorder=1)
        else:
            text += f" {arrows[int(level > high)]}"
        # where there is seldom a point: at the top of an upright line, at the right of a level one
        words: dict[str, Any] = {"size": 10, "color": GREEN, "textcoords": "offset points", "zorder": 1}
        if line == axes.axhline:
            words |= {"ha": "right", "va": "bottom" if level <= high else "top"}
            words |= {"xytext": (-6, 4 if level <= high else -6), "xycoords": ("axes fraction", "data")}
            axes.annotate(text, (1.0, min(max(level, low), high)), **words)
        else:
            words |= {"ha": "left" if level <= high else "right", "va": "top", "xycoords": ("data", "axes fraction")}
            words |= {"rotation": 90, "xytext": (4, -6)} if level <= high else {"xytext": (-6, -24)}
            axes.annotate(text, (min(max(level, low), high), 1.0), **words)


def _label_chunks(axes: Axes, shown: list[FrontierPoint]) -> None:
    """The chunk beside each point, where it covers least; points of one architecture on each other share a label."""
    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]  # the layout says where the points are
    scale = 72 / figure.dpi
    places = [scale * axes.transData.transform((point.x.mean, point.y.mean)) for point in shown]
    near: list[tuple[str, Any, list[int]]] = []
    for point, at in zip(shown, places, strict=True):
        for arch, there, chunks in near:
            if arch == point.candidate.arch and math.dist(at, there) < LABEL_APART:
                chunks.append(point.chunk)
                break
        else:
            near.append((point.candidate.arch, at, [point.chunk]))
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    for arch, (x, y), chunks in near:
        text = ", ".join(map(str, sorted(chunks)))
        wide, high = 6.6 * len(text), 10.0
        corners = [(9, 6), (-9 - wide, 6), (9, -6 - high), (-9 - wide, -6 - high), (-wide / 2, 14), (-wide / 2, -26)]
        corners += [(18, 20), (-18 - wide, 20), (18, -20 - high), (-18 - wide, -20 - high)]
        boxes = [(x + dx, y + dy, x + dx + wide, y + dy + high) for dx, dy in corners]
        best = min(range(len(boxes)), key=lambda at: sum(_overlap(boxes[at], other) for other in taken))
        taken.append(boxes[best])
        axes.annotate(
            text, tuple(axes.transData.inverted().transform((x / scale, y / scale))), xytext=corners[best],
            textcoords="offset points", size=10, color=arch_colour(arch), fontweight="bold", zorder=6,
        )  # fmt: skip


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """The area that two boxes (left, bottom, right, top) share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _frontier_note(found: Frontier) -> str:
    question = found.question
    first, unit = found.rows[0], "req/s" if question.load_kind == "request_rate" else "at once"
    tuned = len(question.space.draft_lengths) > 1
    note = setting_line(
        asdict(question.base),
        f"{question.load:g} {unit}",
        run_seeds(question.base.traffic.seed, question.num_runs),
        drafts="draft lengths by formula" if tuned else None,
    )
    note += " Numbers: prompt chunk. "
    note += "Pale: dominated beyond the profile's own error. "
    behind = found.those("does not keep up")
    note += f"Left out: {len(behind)} that did not keep up. " if behind else ""
    axes = [metric.split("_")[1] for metric in (question.x, question.y)]
    levels = question.goal.levels_ms
    note += "Shaded: within the service levels. " if any(name in axes for name in levels) else ""
    note += "".join(f"Not on an axis: {n.upper()} ≤ {level:g} ms. " for n, level in levels.items() if n not in axes)
    return note + f"Bars: 95% confidence over {question.num_runs} seeds. Simulated, profile {first['profile']}."
