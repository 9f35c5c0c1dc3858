"""torchtitan's small Llama, saved at every step.  Kill it, start it again: it goes on from the newest step.

In a checkout of torchtitan, which has a tokenizer and some texts, with this directory on the PYTHONPATH:

torchrun --nproc-per-node 2 -m torchtitan.train --module torchtitan_llama --config llama3_stillframe --training.steps 20
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import stillframe


def llama3_stillframe() -> Trainer.Config:
    config = llama3_debugmodel()
    config.checkpoint = stillframe.integrations.torchtitan.Manager.Config(
        interval=1,
        keep_latest_k=3,
        last_save_in_hf=True,  # at the end, the model alone, for Hugging Face: outputs/checkpoint/step-20
    )
    return config


def llama3_tiers() -> Trainer.Config:
    """On a cluster: each node's own disk at every step, a shared directory at every hundredth."""
    config = llama3_stillframe()
    config.checkpoint.root = "/nvme/{node}/llama3"
    config.checkpoint.options = {"tiers": [stillframe.Tier("/lustre/llama3", every=100)]}
    return config
