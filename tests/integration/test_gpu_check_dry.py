"""The GPU check without a GPU: the same parts, commands and document, on little."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_goes_the_whole_way(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    chosen = [option for name in ("smoke", "benchmark") for option in ("--only", name)]
    command = [sys.executable, "benchmarks/gpu_check.py", "--dry", *chosen, "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = json.loads(out.read_text())
    assert document["dry"]
    assert document["outcome"] == "ok"
    assert {"python", "torch"} <= set(document["versions"])
    smoke, benchmark = (document["parts"][name]["figures"] for name in ("smoke", "benchmark"))
    assert smoke["outcomes"] == {"ok": 3}
    assert {each["kernel"] for each in smoke["measurements"]} == {"online", "fused", "legacy"}
    assert all(each["values"]["step_device_seconds"] for each in smoke["measurements"])
    assert any(line.startswith("online") for line in benchmark["table"])
