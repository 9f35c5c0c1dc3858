"""What ``make dist`` does with the wheel in a clean environment: a run is killed with SIGKILL, resumed, and compared.

Not a test of pytest: nothing is installed there but the wheel.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, KILL_AFTER = 30, 12
TRAIN = """
import sys, torch, stillframe
root, steps, kill_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "rng": stillframe.RNG()}
with stillframe.Checkpointer(root, keep=stillframe.KeepLast(3)) as checkpointer:
    report = checkpointer.restore(state)
    print("from", report.step, flush=True)
    for step in range(report.next_step, steps):
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.save(step, state)
        if step == kill_after:
            checkpointer.wait()
            print("kill me", flush=True)
            sys.stdin.read()
print(loss.item(), sum(each.detach().double().sum().item() for each in model.parameters()), flush=True)
"""


def run(root: Path, kill_after: int = -1) -> list[str]:
    command = [sys.executable, "-c", TRAIN, str(root), str(STEPS), str(kill_after)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if lines[-1] == "kill me":
                process.send_signal(signal.SIGKILL)
    assert process.returncode in (0, -signal.SIGKILL), process.returncode
    return lines


def main() -> None:
    import stillframe

    where = Path(stillframe.__file__)
    assert "site-packages" in where.parts, f"not the wheel: {where}"
    assert (where.parent / "py.typed").is_file()
    assert (where.parent / "observe" / "report.css").is_file()
    with tempfile.TemporaryDirectory() as home:
        alone = run(Path(home) / "alone")
        assert run(Path(home) / "killed", KILL_AFTER)[-1] == "kill me"
        again = run(Path(home) / "killed")
        assert (alone[0], again[0], again[-1]) == ("from None", f"from {KILL_AFTER}", alone[-1]), (alone, again)
        tool = Path(sys.executable).with_name("stillframe")
        for command in (["list"], ["verify"], ["report", "-o", str(Path(home) / "report.html")]):
            subprocess.run([str(tool), command[0], str(Path(home) / "killed"), *command[1:]], check=True)
    print("the wheel works: killed, resumed, bit for bit")  # noqa: T201


if __name__ == "__main__":
    main()
