"""Watches imports, to learn after which of them a process can't be forked, and who needs those."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType, MethodType, ModuleType
from typing import Any

Effects = frozenset[str]
"""What imports have left in a process, by names that are equal only for the same effect."""


class ImportWatch:
    """Records which module imports which, and which modules' imports have left an effect.

    Python's frames say whose code imports: of a module that loads others on attribute access, it
    is the one whose body asked for the attribute.
    """

    def __init__(self, effects: Callable[[], Effects]) -> None:
        """
        Args:
            effects: returns those that there are now; called before and after each new import.
        """
        self._effects = effects
        self._imported: dict[str, set[str]] = defaultdict(set)
        """Module → the modules that it imports."""

        self._blamed: dict[str, set[str]] = defaultdict(set)
        """Effect → the modules whose code ran when it appeared."""

        self._known: Effects = frozenset()
        self._loaded = 0
        self._is_watching = False
        self.is_blind = False
        """Whether the effects of an import couldn't be looked at."""

        self._originals = builtins.__import__, importlib.import_module

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all imports meanwhile."""
        self._known, self._loaded, self._is_watching = self._effects(), len(sys.modules), True
        ours = self._statement, self._call
        builtins.__import__, importlib.import_module = ours
        try:
            yield
        finally:
            # Who has wrapped one of ours is given the original by it.
            self._is_watching = False
            if builtins.__import__ == ours[0]:
                builtins.__import__ = self._originals[0]
            if importlib.import_module == ours[1]:
                importlib.import_module = self._originals[1]
            self._give_back()

    def _give_back(self) -> None:
        """Give the original to modules that have imported our `import_module` by name."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            for name, value in list(names.items()):
                if isinstance(value, MethodType) and value.__self__ is self:
                    names[name] = self._originals[1]

    def culprits(self, effect: str) -> frozenset[str]:
        """Return the modules whose code ran when this effect appeared; empty if none is known."""
        return frozenset(self._blamed.get(effect, ()))

    def dependents(self, culprits: Iterable[str]) -> set[str]:
        """Return these modules, and all that import them, directly or not."""
        return dependents(set(culprits), self._imported, sys.modules)

    def _statement(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        def load() -> Any:
            return self._originals[0](name, globals, locals, fromlist, level)

        if not self._is_watching:
            return load()
        full = _absolute(name, (globals or {}).get("__package__") or "", level)
        return self._watched(load, full, [f"{full}.{part}" for part in fromlist or ()])

    def _call(self, name: str, package: str | None = None) -> ModuleType:
        def load() -> ModuleType:
            return self._originals[1](name, package)

        if not self._is_watching:
            return load()
        level = len(name) - len(name.lstrip("."))
        module: ModuleType = self._watched(load, _absolute(name[level:], package or "", level), ())
        return module

    def _watched(self, load: Callable[[], Any], module: str, parts: Iterable[str]) -> Any:
        importer = _body_of(sys._getframe(2))
        if module not in sys.modules:
            self._look({importer})
        before = len(sys.modules)
        try:
            return load()
        finally:
            imported = {module, *(part for part in parts if part in sys.modules)}
            if importer:
                self._imported[importer] |= imported
            if len(sys.modules) != before:
                # Those that were loaded since the last look; else the rest of this one's body ran.
                new = len(sys.modules) - self._loaded
                self._look(set(islice(reversed(sys.modules), max(new, 0))) or imported)

    def _look(self, suspects: set[str]) -> None:
        """Blame effects that have appeared since the last look on the modules that ran since."""
        try:
            effects = self._effects()
        except OSError:  # too many open files; the library's import goes on
            self.is_blind = True
            return
        for effect in effects - self._known:
            self._blamed[effect] |= suspects - {""}
        self._known, self._loaded = effects, len(sys.modules)


def dependents(
    culprits: set[str], imported: Mapping[str, set[str]], loaded: Iterable[str]
) -> set[str]:
    """Return these modules, and all that import them or lie in them, directly or not.

    Args:
        imported: module → the modules that it imports.
        loaded: all modules.
    """
    importers = defaultdict(set)
    for importer, modules in imported.items():
        for module in modules:
            importers[module].add(importer)
    for module in list(loaded):
        package, _, _ = module.rpartition(".")
        if package:
            importers[package].add(module)
    found, new = set[str](), set(culprits)
    while new:
        found |= new
        new = set().union(*(importers[module] for module in new)) - found
    return found


def _absolute(name: str, package: str, level: int) -> str:
    """Return the full name of a module that a package's module imports."""
    if not level:
        return name
    above = package.rsplit(".", level - 1)[0]
    return f"{above}.{name}" if name else above


def _body_of(frame: FrameType | None) -> str:
    """Return the module whose body is being executed; "" if it is the program itself."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return "" if name == "__main__" else name
