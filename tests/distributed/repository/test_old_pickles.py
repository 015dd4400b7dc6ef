"""Files that were written at e07bc83, where modules had other names, can still be read. [Note: old names]"""

from __future__ import annotations

import io
import pickle

import torch

from flatfsdp.engine.base.aliases import ALIASES
from tests.conftest import Run
from tests.distributed.repository.pickles_of_e07bc83.write import FOLDER, a_model, settings


def _read(rank: int, world: int) -> list[float]:
    model = pickle.loads((FOLDER / f"model{rank}.pickle").read_bytes())
    state = torch.load(FOLDER / f"state{rank}.pt", weights_only=True)
    fresh = a_model()
    fresh.load_state_dict(state)
    batch = torch.arange(6.0).view(2, 3) + rank
    losses = []
    for each in (model, fresh, a_model()):
        loss = each(batch).square().sum()
        loss.backward()
        assert all(parameter.grad is not None for parameter in each.parameters() if parameter.numel())
        losses.append(float(loss))
    return losses


def test_models_and_sharded_state_dicts(pool2: Run) -> None:
    for loaded, filled, expected in pool2(_read):
        assert loaded == filled == expected


def test_settings() -> None:
    loaded = pickle.loads((FOLDER / "settings.pickle").read_bytes())
    assert list(map(repr, loaded)) == list(map(repr, settings()))
    assert [type(each) for each in loaded] == [type(each) for each in settings()]


def test_the_files_hold_old_names() -> None:
    written = b"".join(path.read_bytes() for path in FOLDER.iterdir() if path.suffix in {".pickle", ".pt"})
    held = {name for name in ALIASES if f"{name}\n".encode() in written}
    assert {f"flatfsdp.{name}" for name in ("owned", "groups", "layout", "root", "policy.strategy")} <= held


def test_a_state_dict_names_what_earlier_versions_have() -> None:
    file = io.BytesIO()
    torch.save(torch.load(FOLDER / "state0.pt", weights_only=True), file)
    assert b"flatfsdp.owned\n_rebuild" in file.getvalue() and b"flatfsdp.engine" not in file.getvalue()
