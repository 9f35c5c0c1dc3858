"""Puts :class:`.accelerator.StillframeAccelerator` between an accelerator's own class and Accelerate's."""

from __future__ import annotations

import os
from typing import Any, Literal

import accelerate
from accelerate.utils import DistributedType

from stillframe import Checkpointer
from stillframe.errors import ConfigError
from stillframe.integrations.accelerate.accelerator import StillframeAccelerator
from stillframe.integrations.frameworks import check_version, put_between, refuse

TESTED = "1.15"
_TRIED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)


def attach(
    accelerator: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    skip: Literal["exact", "fast"] = "exact",
    **options: Any,
) -> Checkpointer:
    """Have this accelerator save and load its state with stillframe.  Call it on every rank, before ``load_state``.

    root: where checkpoints are stored; by default ``_stillframe`` in the ``project_dir``.  The directories that
    ``save_state`` makes lie beside it, or in a directory beside it.
    skip: what ``skip_first_batches`` does in a loader with workers, which may draw random numbers: have them load the
    skipped batches again, so that they draw the same (``"exact"``), or not (``"fast"``).
    options: of :class:`stillframe.Checkpointer`, such as ``arena`` and ``tiers``.  A save that fails is logged and
    training goes on, unless ``on_error`` says otherwise.

    Returns the checkpointer, for ``wait()`` and ``stats()``; ``accelerator.end_training()`` closes it.
    Blocks until the keeper of a run that was just killed has committed what it holds.
    Raises: :class:`ConfigError` for a version that was not tested, and for what cannot work.
    """
    kind = type(accelerator)
    if not isinstance(accelerator, accelerate.Accelerator):
        raise ConfigError(f"attach({kind.__name__}): give an accelerate.Accelerator")
    if issubclass(kind, StillframeAccelerator):
        raise ConfigError("attach(accelerator): it is attached already")
    if skip not in ("exact", "fast"):
        raise ConfigError(f"skip={skip!r}: give 'exact' or 'fast'")
    check_version(accelerate, TESTED, "do not attach")
    check_accelerator(accelerator, options)
    if root is None:
        if accelerator.project_dir is None:
            raise ConfigError("attach(accelerator): give a root, or the Accelerator a project_dir")
        root = os.path.join(accelerator.project_dir, "_stillframe")
    if "://" in os.fspath(root) or "{node}" in os.fspath(root):
        raise ConfigError(
            f"attach(accelerator, {os.fspath(root)!r}): give a directory that all ranks see; tiers= go further"
        )
    put_between(accelerator, StillframeAccelerator, accelerate.Accelerator)
    try:
        checkpointer: Checkpointer = accelerator.begin(os.fspath(root), skip, {"on_error": "warn", **options})
    except BaseException:
        accelerator.__class__ = kind
        raise
    return checkpointer


def check_accelerator(accelerator: Any, options: dict[str, Any]) -> None:
    """Raises :class:`ConfigError` for what cannot work, or was never tried."""
    configuration = accelerator.project_configuration
    foreign = {"rank", "world_size", "shared", "storage_options", "when_busy"} & options.keys()
    if foreign:
        raise ConfigError(f"attach({', '.join(sorted(foreign))}=…): the accelerator decides that")
    wrong = {
        "DeepSpeed": (
            accelerator.distributed_type == DistributedType.DEEPSPEED,
            "use stillframe.integrations.deepspeed",
        ),
        "FSDP1": (
            accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2,
            "give FullyShardedDataParallelPlugin(fsdp_version=2)",
        ),
        str(accelerator.distributed_type): (accelerator.distributed_type not in _TRIED, "it was not tried"),
        "parallelism_config": (accelerator.parallelism_config is not None, "it was not tried"),
        "save_on_each_node": (configuration.save_on_each_node, "all ranks need to see one directory"),
        "keep": (
            options.get("keep") is not None and configuration.automatic_checkpoint_naming,
            "total_limit says how many stay",
        ),
    }
    refuse("attach(accelerator)", wrong)
