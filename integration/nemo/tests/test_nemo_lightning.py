"""Beside NeMo 2's `nemo.lightning`: its optimizer module makes our optimizer, and Lightning's trainer steps it."""

from functools import partial

import pytest
import torch

from stepstack_nemo import DistributedFusedAdam

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # NeMo and what it imports warn of much


@pytest.fixture(scope="module")
def optimizer_module():
    optim = pytest.importorskip(
        "nemo.lightning.pytorch.optim", reason="NeMo is not here, or is 3, which has no nemo.lightning.pytorch"
    )
    return optim.PytorchOptimizerModule


@pytest.mark.parametrize("biased", [True, False])  # without a bias, one of the module's two groups is empty
@pytest.mark.parametrize("clip", [0.05, None])
def test_its_optimizer_module_trains_as_with_torch(optimizer_module, biased, clip):
    ours = trained(optimizer_module(partial(DistributedFusedAdam, lr=0.01, weight_decay=0.1)), biased, clip)
    torchs = trained(optimizer_module(partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)), biased, clip)
    assert len(ours) == len(torchs)
    for weight, reference in zip(ours, torchs, strict=True):
        torch.testing.assert_close(weight, reference, rtol=1e-6, atol=1e-6)


def trained(optimizer_module, biased, clip):
    """The weights of a small model after five steps of Lightning's trainer."""
    from lightning.pytorch import LightningModule, Trainer

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(6, 16, bias=biased), torch.nn.Tanh(), torch.nn.Linear(16, 3, bias=biased)
            )

        def training_step(self, batch):
            return self.layers(batch).square().mean()

    torch.manual_seed(0)
    model = Model()
    optimizer_module.connect(model)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=5,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), 4))
    return [param.detach().clone() for param in model.parameters()]
