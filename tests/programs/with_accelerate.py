"""Accelerate: accumulation, clipping, a scheduler; `save_state`, and `load_state` in a new process.

with_accelerate.py ddp | STATE_DICT_TYPE FOLDER save | STATE_DICT_TYPE FOLDER load
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind, folder, phase = [*sys.argv[1:], "", ""][:3]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


plugin = None
if kind != "ddp":
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # makes Accelerate accept a CPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type=kind,
        use_orig_params=True,
        sync_module_states=False,  # needs an accelerator in Accelerate
        cpu_ram_efficient_loading=False,
    )
accelerator = Accelerator(fsdp_plugin=plugin, cpu=plugin is None, gradient_accumulation_steps=2)
torch.manual_seed(0)
net = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(16, 4))
data = TensorDataset(torch.randn(80, 16), torch.randint(0, 4, (80,)))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=4), scheduler)


def train(batches):  # type: ignore[no-untyped-def]
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print("LOSS", f"{accelerator.gather(loss.detach()).mean().item():.6f}")


batches = list(loader)
accelerator.print("MODEL", type(model).__module__)
if phase == "load":
    accelerator.load_state(folder)
    assert optimizer.state_dict()["state"], "the optimizer of a new process has nothing to resume from"
else:
    train(batches[:6])
    if phase == "save":
        accelerator.save_state(folder)
if phase != "save":
    train(batches[6:])
    state = accelerator.get_state_dict(model)
    accelerator.print("LOSS", f"{sum(value.double().sum().item() for value in state.values()):.4f}")
accelerator.end_training()
