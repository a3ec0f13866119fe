"""`pdvsim validate`: compare measurements with simulations. Each kind of validation is a module.

- `runs`: real runs of `realrun`, all of them (the default); `launches`: one of them, launch by launch (--run)
- `serve`: serve such runs on this machine's GPU first (--serve)
- `bench`: a benchmark of your own server (--bench); `silicon`: published measurements of servers (--silicon)
"""

from __future__ import annotations

from pdvsim.cli.command import Command
from pdvsim.cli.validate.options import Compared, ValidateOptions


class ValidateCommand(Command, ValidateOptions):
    """Compare real serving runs with simulations of the same experiments and seeds."""

    def execute(self) -> int:
        if self.serve is not None:
            from pdvsim.cli.validate.serve import serve_plan

            return serve_plan(self, self.serve)
        if self.run is not None:
            from pdvsim.cli.validate.launches import compare_launches

            return compare_launches(self, self.run)
        if self.silicon is None and not self.bench:
            from pdvsim.cli.validate.runs import compare_runs

            return compare_runs(self)
        from pdvsim.bench.output import dumps

        comparison = compared(self)
        print(dumps(comparison.document) if self.json else comparison)
        return 0


def compared(args: ValidateOptions) -> Compared:
    """Measurements and what is predicted for them."""
    if args.silicon is not None:
        from pdvsim.cli.validate.silicon import compare_silicon

        return compare_silicon(args)
    if args.bench and args.pair is not None:
        from pdvsim.cli.validate.bench import compare_bench

        return compare_bench(args, args.bench, args.pair)
    from pdvsim.cli.validate.runs import compared_runs

    return compared_runs(args)[1]
