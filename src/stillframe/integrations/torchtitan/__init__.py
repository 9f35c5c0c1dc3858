"""torchtitan's ``Trainer`` on stillframe: one line of its configuration::

    checkpoint=stillframe.integrations.torchtitan.Manager.Config(interval=1)

The fields of torchtitan's own configuration mean what they meant.  But a save no longer holds training up, needs no
collective, cannot tear, and is resumed from bit for bit: random numbers are part of it, and so is the position of every
data loader.  What torchtitan's tools read, torchtitan writes: the seed, and the model alone after the last step.

Importing this raises :class:`ConfigError` for versions of torchtitan that were not tested.
"""

from __future__ import annotations

import torchtitan

from stillframe.integrations.frameworks import check_version

TESTED = "0.3"
check_version(torchtitan, TESTED, "use stillframe.Checkpointer in a loop of your own")

from stillframe.integrations.torchtitan.manager import Manager  # noqa: E402  # another version has other names

__all__ = ["Manager"]
