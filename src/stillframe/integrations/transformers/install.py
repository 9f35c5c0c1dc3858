"""Puts :class:`.trainer.StillframeTrainer` between a trainer's own class and ``transformers.Trainer``."""

from __future__ import annotations

import sys
from typing import Any

import accelerate
import transformers
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import HubStrategy

from stillframe.errors import ConfigError
from stillframe.integrations.frameworks import check_version, put_between, refuse
from stillframe.integrations.transformers.trainer import StillframeTrainer

TESTED = {"transformers": "5.22", "accelerate": "1.15", "trl": "1.16", "peft": "0.21"}


def install(trainer: transformers.Trainer, **options: Any) -> None:
    """Have this trainer save and resume with stillframe.  May be called again: then with other options.

    ``options``: of :class:`stillframe.Checkpointer`, such as ``arena`` and ``tiers``.  A save that fails is logged and
    training goes on, unless ``on_error`` says otherwise.  The class of the trainer becomes a subclass of its own, whose
    overrides, and those of TRL, stay in force.

    Raises: :class:`ConfigError` for versions that were not tested, and for arguments that cannot work.
    """
    kind = type(trainer)
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigError(f"install({kind.__name__}): give a transformers.Trainer, or a trainer of TRL")
    foreign = {"root", "keep", "rank", "world_size", "shared", "storage_options"} & options.keys()
    if foreign:
        raise ConfigError(f"install({', '.join(sorted(foreign))}=…): the trainer's own arguments say that")
    check_versions(kind)
    check_arguments(trainer)
    if not issubclass(kind, StillframeTrainer):
        put_between(trainer, StillframeTrainer, transformers.Trainer)
    assert isinstance(trainer, StillframeTrainer)
    trainer.stillframe_options = {"on_error": "warn", **options}


def check_versions(kind: type) -> None:
    """Of the packages that this trainer consists of, and of PEFT if it is in use.  Raises :class:`ConfigError`."""
    used = {each.__module__.partition(".")[0] for each in kind.__mro__} | {accelerate.__name__, "peft"}
    for name in sorted(used & TESTED.keys() & sys.modules.keys()):
        check_version(sys.modules[name], TESTED[name], "train without install()")


def check_arguments(trainer: Any) -> None:
    """Raises :class:`ConfigError` for what cannot work, or was never tried."""
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    wrong = {
        "DeepSpeed": (trainer.is_deepspeed_enabled, "use stillframe.integrations.deepspeed"),
        "FSDP1": (plugin is not None and not trainer.accelerator.is_fsdp2, 'give fsdp_config={"version": 2}'),
        "a model that Trainer has not divided itself (tensor parallelism, DistributedConfig)": (
            plugin is None and any(isinstance(each, DTensor) for each in trainer.model.parameters()),
            "it was not tried",
        ),
        "torch_compile with FSDP": (plugin is not None and args.torch_compile, "it was not tried"),
        "push_to_hub with SHARDED_STATE_DICT": (
            plugin is not None and args.push_to_hub and "SHARDED" in str(plugin.state_dict_type),
            "no weights would be uploaded: give FULL_STATE_DICT",
        ),
        "enable_jit_checkpoint": (args.enable_jit_checkpoint, "save at every step instead: it costs no time"),
        "save_on_each_node": (args.save_on_each_node, "all ranks need to see one output_dir"),
        "hub_strategy": (
            args.push_to_hub and args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS),
            "nobody could resume from a checkpoint on the Hub: give 'every_save' or 'end'",
        ),
    }
    refuse("install(trainer)", wrong)
    if len(getattr(trainer.model, "peft_config", {})) > 1:
        raise ConfigError("a PEFT model with several adapters is not supported by install(trainer): it was not tested")
