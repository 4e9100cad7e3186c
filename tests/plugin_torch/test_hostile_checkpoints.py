"""Files that run something when they are unpickled aren't, whoever has written them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from polytrain import CheckpointError
from polytrain_torch import Torch
from polytrain_torch.checkpoints.sharded import SafeReader, load_sharded


class Bomb:
    """Makes a directory, wherever it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What is there if a bomb has gone off."""
    return tmp_path / "mark"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint's."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    return path


def save_sharded(directory: Path, **state: Any) -> None:
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save(state, checkpoint_id=directory)


def make_weights(directory: Path, mark: Path) -> None:
    torch.save({"weight": Bomb(mark)}, directory / "model.pt")


def make_list_of_tensors(directory: Path, mark: Path) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))


def make_list_of_one_rank(directory: Path, mark: Path) -> None:
    (directory / "shards-0.metadata").write_bytes(pickle.dumps(Bomb(mark)))


def make_entry_of_list(directory: Path, mark: Path) -> None:
    save_sharded(directory, model={"weight": torch.ones(2)})
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.planner_data["more"] = Bomb(mark)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def make_tensor(directory: Path, mark: Path) -> None:
    """In the place of a tensor, where the list says that it is."""
    save_sharded(directory, model={"weight": torch.ones(2)})
    [file] = directory.glob("*.distcp")
    torch.save(Bomb(mark), file)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)(info.relative_path, 0, file.stat().st_size)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


class Attribute:
    """Is pickled as an attribute of a class, as early versions of Python 3.11 pickle enums."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._kind, self._name)


def save_with_attribute(directory: Path, kind: type, name: str) -> None:
    save_sharded(directory, model={"weight": torch.ones(2)})
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.planner_data["more"] = Attribute(kind, name)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_list_of_tensors_that_another_version_of_python_has_written_is_read(
    directory: Path,
) -> None:
    save_with_attribute(directory, _MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    metadata = SafeReader(directory).read_metadata()
    assert metadata.planner_data["more"] is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@pytest.mark.parametrize(
    ("kind", "name"),
    [(_MEM_FORMAT_ENCODING, "__reduce_ex__"), (TensorProperties, "create_from_tensor")],
)
def test_no_other_attribute_is_got_for_a_list_of_tensors(
    directory: Path, kind: type, name: str
) -> None:
    save_with_attribute(directory, kind, name)
    with pytest.raises(pickle.UnpicklingError, match=f"getattr.*{name}"):
        SafeReader(directory).read_metadata()


def make_deepspeed(directory: Path, mark: Path) -> None:
    (directory / "deepspeed").mkdir()
    state = {"module": {"weight": Bomb(mark)}}
    torch.save(state, directory / "deepspeed" / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize(
    "make",
    [
        make_weights,
        make_list_of_tensors,
        make_list_of_one_rank,
        make_entry_of_list,
        make_tensor,
        make_deepspeed,
    ],
)
def test_loading_a_model_runs_nothing(
    make: Callable[[Path, Path], None], directory: Path, mark: Path
) -> None:
    make(directory, mark)
    with pytest.raises((pickle.UnpicklingError, CheckpointError, dcp.api.CheckpointException)):
        Torch().engine().load(directory)
    assert not mark.exists()


def test_restoring_what_is_no_tensor_runs_nothing(directory: Path, mark: Path) -> None:
    """Where every rank writes, an optimizer's settings are in the ranks' parts."""
    save_sharded(directory, optimizer={"lr": Bomb(mark)})
    with pytest.raises(dcp.api.CheckpointException, match=r"[Ww]eights.only"):
        load_sharded({"optimizer": {"lr": 0.1}}, directory)
    assert not mark.exists()


def test_a_part_outside_of_the_directory_is_not_read(directory: Path, tmp_path: Path) -> None:
    save_sharded(directory, model={"weight": torch.ones(2)})
    [file] = directory.glob("*.distcp")
    file.rename(tmp_path / "secret")
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)("../secret", info.offset, info.length)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match=r"\.\./secret.*isn't in the checkpoint"):
        Torch().engine().load(directory)


def test_what_ranks_have_saved_is_loaded(directory: Path) -> None:
    """Tensors of all kinds, nested, and the settings of an optimizer."""
    model = {"a.weight": torch.ones(2, 3, dtype=torch.bfloat16), "b": {"n": torch.tensor(3)}}
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "names": ["a", "b"]}
    save_sharded(directory, model=model, optimizer=settings)
    weights = Torch().engine().load(directory)
    assert weights.keys() == {"a.weight", "b.n"}
    assert torch.equal(weights["a.weight"], model["a.weight"])
    states: dict[str, Any] = {"optimizer": {name: 0 for name in settings}}
    load_sharded(states, directory)
    assert states == {"optimizer": settings}
