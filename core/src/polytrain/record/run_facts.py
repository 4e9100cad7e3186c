"""What a run was started with, as its journal says it: for trackers, `show` and the page. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polytrain.record.configuration import Configuration, chosen, shown
from polytrain.record.entries import CommitFound, Entry, Launched, Opened, RankJoined

_SHORT_COMMIT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one driver of a run ran."""

    driver: int
    """The fencing token of its lease: the number before the dot of its attempts."""

    command: Sequence[str] = ()
    """Its command line as it was typed, without secrets; empty in a notebook."""

    script: str = ""
    """Its Python file; empty if it is a console command, or if there is none."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Distribution → version."""

    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """As `RunFacts.hyperparameters`."""

    commit: str = ""
    """The git commit of its code; empty if that is in no repository."""

    branch: str = ""
    """The git branch; empty if none was checked out."""

    is_dirty: bool | None = None
    """Whether its code differed from the commit; None if that is unknown."""

    @property
    def code(self) -> str:
        """The commit for people: `3f2a1b4c9d0e (main, with changes)`; empty without one."""
        known = (self.branch, "with changes" if self.is_dirty else "")
        more = ", ".join(each for each in known if each)
        return f"{self.commit[:_SHORT_COMMIT]} ({more})" if more else self.commit[:_SHORT_COMMIT]


@dataclass(slots=True)
class RunFacts:
    """What a run was started with, by its last driver: a fold over the journal's entries.

    Trackers get it as parameters, `polytrain show` prints it
    (`view/cli/run_text`), and the page reads it in `view/page/facts.facts_of`.
    """

    backend: str = ""
    num_workers: int = 0
    configuration: Configuration = field(default_factory=Configuration)
    programs: list[Program] = field(default_factory=list)
    """What each driver of the run ran, the last one last: a run may be resumed by another program,
    at another commit."""

    _joined: dict[int, RankJoined] = field(default_factory=dict, repr=False)
    """Rank → how it joined the last attempt."""

    def take(self, entry: Entry) -> None:
        """Take the next entry of the journal."""
        match entry:
            case Opened():
                self._opened(entry)
            case CommitFound(token=token) if self.programs and self.program.driver == token:
                self.programs[-1] = replace(
                    self.program,
                    commit=entry.commit,
                    branch=entry.branch,
                    is_dirty=entry.is_dirty,
                )
            case Launched():
                self._joined = {}
            case RankJoined(rank=rank):
                self._joined[rank] = entry

    @property
    def program(self) -> Program:
        """What the last driver ran."""
        return self.programs[-1] if self.programs else Program(driver=0)

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The training function's config, then the backend's options that aren't its defaults.

        As one level, such as `optimizer.lr`, in plain values; `…` is in place of secrets.
        """
        return self.program.hyperparameters

    @property
    def settings(self) -> Mapping[str, Any]:
        """All other options that aren't defaults, by where a user sets them.

        For example `run_config.failure_config.max_failures`.
        """
        given = shown(chosen(self.configuration.options))
        return {name: value for name, value in given.items() if value not in (None, [], {})}

    @property
    def nodes(self) -> Sequence[str]:
        """The names of the machines that the last attempt's ranks are on, each once."""
        return list(dict.fromkeys(each.node for _, each in sorted(self._joined.items())))

    @property
    def devices(self) -> Mapping[str, int]:
        """What the last attempt's ranks compute on → how many of them do."""
        return Counter(each.device for _, each in sorted(self._joined.items()))

    def _opened(self, opened: Opened) -> None:
        configuration = opened.configuration or Configuration()
        self.backend = opened.identity.get("backend", "")
        self.num_workers = opened.world_size
        self.configuration = configuration
        self.programs.append(
            Program(
                driver=opened.token,
                command=tuple(configuration.command),
                script=configuration.script,
                versions=configuration.versions,
                hyperparameters=dict(shown(configuration.hyperparameters)),
            )
        )
