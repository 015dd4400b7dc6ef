"""Weights as safetensors files, written and read by the safetensors library on the other side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import flatfsdp
from flatfsdp import FullyShardedDataParallel as FSDP
from flatfsdp import checkpoint
from flatfsdp.checkpoint import export_safetensors, load_safetensors
from flatfsdp.checkpoint.disk import through
from flatfsdp.engine.layout.layout import ParamSpec, Span
from flatfsdp.engine.state.boxes import boxes_of, runs_of
from flatfsdp.errors import CheckpointError, ConfigTypeError, ConfigValueError
from tests.harness import inspect
from tests.harness.corners import Setting, seeded
from tests.harness.disks import Counting, Full, Killed, Mortal
from tests.harness.models import WIDTH, Convolution, Feedforward, Low, Motley
from tests.state.optim.test_optim_state import Corners

pytestmark = pytest.mark.distributed

UNITS = (Feedforward, Low, Motley, Convolution)


class Many(Corners):
    """All of `Corners`, convolutions in channels_last and a batch norm's buffers, and buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Convolution(3)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def build(setting: Setting, *, scale: float = 1.0) -> Any:
    inside = seeded(Many)
    with torch.no_grad():
        for each in (*inside.parameters(), *inside.buffers()):
            each.mul_(scale) if each.is_floating_point() else each.zero_() if scale == 0.0 else None
    return setting.wrap(inside, UNITS, ignored_modules=[inside.outside])


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The whole state. Collective."""
    with FSDP.state_dict_type(model, "FULL"):
        return {key: value.clone() for key, value in model.state_dict().items()}


def export(rank: int, world: int, path: str, setting: Setting, **kwargs: Any) -> dict[str, Tensor]:
    model = build(setting)
    figures = flatfsdp.stats(model)
    figures.reset()
    export_safetensors(model, path, **kwargs)
    assert (figures.comm, figures.bytes_unsharded_peak) == ({}, 0)  # nothing was gathered
    return whole(model)


@pytest.mark.parametrize(
    ("world", "setting"),
    [(3, Setting(orig=False)), (2, Setting()), (4, Setting("HYBRID_SHARD")), (2, Setting("NO_SHARD")), (1, Setting())],
    ids=str,
)
def test_the_library_reads_what_every_rank_wrote_of(run: Any, tmp_path: Path, world: int, setting: Setting) -> None:
    expected, *_ = run(world, export, str(tmp_path / "x"), setting)
    assert {each.name for each in (tmp_path / "x").iterdir()} == {
        "model.safetensors",
        "model.safetensors.checksums.json",
    }
    found = load_file(tmp_path / "x" / "model.safetensors")
    assert "first.weight" in found and "last.weight" not in found  # tied
    assert found.keys() | {"last.weight"} == expected.keys()
    for key, value in found.items():
        assert value.dtype == expected[key].dtype and torch.equal(value, expected[key]), key


def test_large_models_are_several_files_with_an_index(pool2: Any, tmp_path: Path) -> None:
    expected, _ = pool2(export, str(tmp_path / "x"), Setting(), max_shard_size=1500, dtype=torch.bfloat16)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    found: dict[str, Tensor] = {}
    for name in files:
        inside = load_file(tmp_path / "x" / name)
        assert {index["weight_map"][key] for key in inside} == {name}
        assert len(inside) == 1 or sum(value.nbytes for value in inside.values()) <= 1500
        found |= inside
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    for key, value in found.items():
        wanted = expected[key].bfloat16() if expected[key].is_floating_point() else expected[key]
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), key


def load(rank: int, world: int, path: str, setting: Setting) -> tuple[dict[str, Tensor], int, int]:
    model = build(setting, scale=0.0)
    counting = Counting()
    with through(counting):
        load_safetensors(model, path, verify=False)
    owned = sum(
        piece.in_shard.numel * flat.shard.element_size()
        for flat in inspect.flat_params(model)
        for piece in flat.layout.owned(flat.rank)
    )
    header = 8 + int.from_bytes(Path(path).read_bytes()[:8], "little")
    return whole(model), counting.bytes_read() - header, owned


@pytest.mark.parametrize(
    ("world", "setting"),
    [(3, Setting()), (2, Setting(orig=False)), (2, Setting(offload=True)), (2, Setting("NO_SHARD"))],
    ids=str,
)
def test_each_rank_reads_only_what_it_owns(run: Any, tmp_path: Path, world: int, setting: Setting) -> None:
    whole_model = seeded(Many)
    state = {key: value.contiguous() for key, value in whole_model.state_dict().items() if key != "first.weight"}
    save_file(state, tmp_path / "weights.safetensors")  # the tied one under its other name
    outside = sum(value.nbytes for key, value in state.items() if key.startswith("outside"))
    buffers = sum(value.nbytes for key, value in whole_model.named_buffers() if key != "scratch")
    for found, read, owned in run(world, load, str(tmp_path / "weights.safetensors"), setting):
        assert found.keys() == state.keys() | {"first.weight"}
        assert all(torch.equal(found[key], value) for key, value in state.items())
        assert read == owned + outside + buffers


def make_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def there_and_back(rank: int, world: int, path: str) -> None:
    model = build(Setting())
    export_safetensors(model, path, max_shard_size="4KB")
    with torch.device("meta"):
        inside = Many()
    inside.outside.to_empty(device="cpu")
    other = Setting(orig=False).wrap(inside, UNITS, ignored_modules=[inside.outside], param_init_fn=make_empty)
    load_safetensors(other, path)
    expected, found = whole(model), whole(other)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    x = torch.randn(2, WIDTH)
    assert torch.equal(other(x), model(x))


def over_what_was_gathered(rank: int, world: int, path: str, setting: Setting) -> None:
    model = build(setting)
    x = torch.randn(2, WIDTH)
    expected = model(x).detach()
    export_safetensors(model, path)  # units that were not resharded show whole parameters now
    other = build(setting, scale=0.5)
    different = other(x)
    load_safetensors(other, path)
    assert not torch.equal(different, expected) and torch.equal(other(x), expected)
    checkpoint.save(f"{path}.full", model=model)
    checkpoint.load(f"{path}.full", model=(third := build(setting, scale=0.5)))
    assert torch.equal(third(x), expected)


def test_models_of_the_meta_device_are_filled(pool2: Any, tmp_path: Path) -> None:
    pool2(there_and_back, str(tmp_path / "x"))


@pytest.mark.parametrize(
    "setting", [Setting(), Setting("SHARD_GRAD_OP"), Setting("SHARD_GRAD_OP", orig=False), Setting("NO_SHARD")], ids=str
)
def test_what_was_gathered_before_is_not_used_after(pool2: Any, tmp_path: Path, setting: Setting) -> None:
    pool2(over_what_was_gathered, str(tmp_path / "x"), setting)


def message(rank: int, world: int, path: str, what: str) -> str:
    model = build(Setting())
    try:
        if what == "load":
            load_safetensors(model, path)
        elif what == "full":
            with through(Full(500 if rank == 1 else 2**30)):
                export_safetensors(model, path, overwrite=True)
        else:
            export_safetensors(model, path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_that_does_not_fit_is_listed_together(pool2: Any, tmp_path: Path) -> None:
    state = {key: value.contiguous() for key, value in seeded(Many).state_dict().items() if "last" not in key}
    state["gain"] = torch.zeros(2)
    state["stray"] = state.pop("seen")
    save_file(state, tmp_path / "x.safetensors")
    for text in pool2(message, str(tmp_path / "x.safetensors"), "load"):
        assert text == (
            f"loading {tmp_path}/x.safetensors: on all 2 ranks: missing from the checkpoint: seen; unexpected "
            "in the checkpoint: stray; gain has shape (2,) in the checkpoint, () here"
        )


def test_damage_is_found_by_the_checksums_or_by_the_sizes(pool2: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    pool2(export, str(path), Setting())
    file = path / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-100] + bytes(100))  # the library opens it, and yields zeros
    for text in pool2(message, str(path), "load"):
        assert f"{path}: damaged, or changed since it was exported: model.safetensors (bytes 0 to" in text
    file.write_bytes(good[:-1])
    for text in pool2(message, str(path), "load"):
        assert "is not a complete safetensors file: it has" in text and "it is truncated" in text


def test_an_export_is_replaced_whole_or_not_at_all(pool2: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    pool2(export, path, Setting())
    for text in pool2(message, path, "export"):
        assert f"rank 0: {path} is complete already. Save to another folder, or pass overwrite=True" in text
    for text in pool2(message, path, "full"):
        assert "rank 1: OSError: [Errno 28] No space left on device" in text
    assert {each.name for each in tmp_path.iterdir()} == {"x"}
    pool2(message, path, "load")


def test_killed_at_any_moment_a_whole_export_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    model = nn.Sequential(*(nn.Linear(2, 3) for _ in range(5)))

    def filled(number: float) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        return model

    export_safetensors(filled(-1.0), path, max_shard_size=100)
    before = -1.0
    for moment in range(200):
        try:
            with through(Mortal(moment)):
                export_safetensors(filled(float(moment)), path, max_shard_size=100, overwrite=True)
        except Killed:
            pass
        else:
            break
        load_safetensors(filled(-5.0), path)
        (value,) = {element for parameter in model.parameters() for element in parameter.flatten().tolist()}
        assert value in (before, float(moment))
        before = value
    assert moment > 25


@pytest.mark.parametrize("size", ["5 parsecs", "GB", 0, -3])
def test_sizes_are_numbers_of_bytes(tmp_path: Path, size: Any) -> None:
    with pytest.raises((ConfigValueError, ConfigTypeError), match=r"^max_shard_size: got "):
        export_safetensors(nn.Linear(1, 1), tmp_path / "x", max_shard_size=size)


@pytest.mark.parametrize(
    "spec",
    [ParamSpec("p", (3, 4, 5)), ParamSpec("p", (2, 3, 4, 5), (60, 1, 15, 3)), ParamSpec("p", ()), ParamSpec("p", (4,))],
)
def test_runs_are_where_a_row_major_tensor_has_them(spec: ParamSpec) -> None:
    numbers = torch.arange(spec.numel).view(spec.shape)
    for start in range(spec.numel):
        for stop in range(start + 1, spec.numel + 1):
            for box in boxes_of(spec, Span(start, stop)):
                block = numbers[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
                runs = [
                    list(range(place, place + span.numel))
                    for place, span in runs_of(box.offsets, box.sizes, spec.shape)
                ]
                assert [number for each in runs for number in each] == block.flatten().tolist()
