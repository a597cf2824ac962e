"""An environment of verifiers, played in a process of its own by an interpreter of its own.

verifiers pins other versions than other packages need, so it is installed separately:

    python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers==0.4.0 uv
    python examples/online/verifiers_door.py --python .venv-vllm/bin/python --out out/verifiers
"""

from pathlib import Path

from clerk import told

import tracegrad as tg

PYTHON = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"

if __name__ == "__main__":
    agent = tg.rollout.verifiers("verifiers_clerk", python=str(PYTHON), paths=[Path(__file__).parent])
    tg.online.train(tasks=agent.tasks(), agent=agent, **told())
