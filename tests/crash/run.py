"""The crash test: `python -m tests.crash.run`, from the repository's root.

Runs are killed at lines of polytrain's code. Afterwards every checkpoint that was committed must be
there, the run must resume from the newest that is intact, and end as if nothing had happened.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from random import Random

from tests.crash.cases import Case, Ending, Verdict, judged
from tests.crash.drivers import warm_up
from tests.crash.inline import BUCKET, IN_BUCKET, IN_DIRECTORY, Inline
from tests.crash.on_ray import SCENARIOS, OnRay, ray_around
from tests.crash.points import spread
from tests.crash.services import s3
from tests.crash.table import print_tables

_TOLD_EVERY = 500

_SHOWN = 20
"""Wrong cases that are told in full."""


def main() -> int:
    """Run what the arguments say; 1 if anything went wrong."""
    arguments = _arguments()
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="polytrain-crash-", dir=arguments.directory))
    needs_bucket = arguments.bucket or arguments.ray
    with s3(BUCKET) if needs_bucket else nullcontext({}) as environment:
        os.environ.update(environment)
        in_bucket = (IN_BUCKET,) if arguments.bucket else ()
        warm_up((*IN_DIRECTORY[-arguments.scenarios :], *in_bucket), directory)
        random = Random(arguments.seed)
        verdicts = []
        for verdict in chain(
            _inline(directory, arguments, random), _on_ray(directory, arguments, random)
        ):
            verdicts.append(verdict)
            if verdict.wrong:
                print(f"wrong: {verdict.case}: {verdict.wrong[0]}", flush=True)
            if len(verdicts) % _TOLD_EVERY == 0:
                print(f"{len(verdicts)} cases, {time.monotonic() - began:.0f} s", flush=True)
    print_tables(verdicts)
    wrong = [verdict for verdict in verdicts if verdict.wrong]
    for verdict in wrong[:_SHOWN]:
        print(f"\n{verdict.case}, in {verdict.directory}")
        print("\n".join(f"  {overdue}" for overdue in verdict.wrong))
    print(f"\nseed {arguments.seed}, {time.monotonic() - began:.0f} s")
    if not wrong:
        shutil.rmtree(directory)
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.crash.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="chooses cases and visits")
    parser.add_argument("--inline", type=int, help="inline cases in a directory; all by default")
    parser.add_argument(
        "--scenarios",
        type=int,
        choices=range(1, len(IN_DIRECTORY) + 1),
        default=len(IN_DIRECTORY),
        help="of these, the last so many",
    )
    parser.add_argument("--bucket", type=int, default=200, help="inline cases in a bucket")
    parser.add_argument("--ray", type=int, default=60, help="cases with workers")
    parser.add_argument("--visits", type=int, default=1, help="of each line that are tried inline")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="inline cases at a time"
    )
    parser.add_argument("--directory", type=Path, help="where the runs are kept meanwhile")
    return parser.parse_args()


def _inline(directory: Path, arguments: argparse.Namespace, random: Random) -> Iterator[Verdict]:
    inline = Inline(directory=directory, random=random, visits=arguments.visits)
    cases = []
    for scenario in IN_DIRECTORY[-arguments.scenarios :]:
        fresh = inline.cases(scenario)
        some = len(fresh) // 10
        cases += fresh
        cases += inline.cases_with_damage(scenario, some)
        cases += inline.cases_with_two_deaths(scenario, some)
        cases += inline.cases_of_resumed_runs(scenario)
    if arguments.inline is not None:
        cases = spread(cases, arguments.inline, _file, random=random)
    in_bucket: list[Case] = []
    if arguments.bucket:
        in_bucket = spread(inline.cases(IN_BUCKET), arguments.bucket, _file, random=random)
    yield from inline.wrong
    # The server isn't made for several clients.
    for kind, chosen, jobs in (("inline", cases, arguments.jobs), ("bucket", in_bucket, 1)):
        expected = [inline.expected[case.scenario.name] for case in chosen]
        directories = [directory / f"{kind}-{number:05d}" for number in range(len(chosen))]
        with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
            yield from pool.map(_judged, chosen, directories, expected, chunksize=4)


def _file(case: Case) -> str:
    return case.points[0].line.file


def _judged(case: Case, directory: Path, expected: Ending) -> Verdict:
    verdict = judged(case, directory, expected=expected)
    point = case.points[0]
    is_by_the_clock = point.visit > 1 or point.line.is_by_clock
    if verdict.killed < len(case.points) == 1 and not is_by_the_clock:
        # Nothing happens at the same time there: what one run does, the next does too.
        verdict.wrong.append("it never came to this point")
    if not verdict.wrong:
        shutil.rmtree(directory)
    return verdict


def _on_ray(directory: Path, arguments: argparse.Namespace, random: Random) -> Iterator[Verdict]:
    if arguments.ray:
        with ray_around(directory) as around:
            on_ray = OnRay(directory=directory, random=random, around=around)
            yield from on_ray.verdicts(SCENARIOS[: arguments.ray], arguments.ray)


if __name__ == "__main__":
    sys.exit(main())
