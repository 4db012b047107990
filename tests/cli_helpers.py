"""Runs the `kvgraft` command in a process of its own."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import kvgraft_jax

# Strictness of this test process that a user's process does not have.
_TEST_ONLY = ('JAX_NUMPY_DTYPE_PROMOTION', 'JAX_NUMPY_RANK_PROMOTION')


@dataclasses.dataclass(frozen=True)
class Result:
  """What a finished command left.

  Attributes:
    rc: exit code; negative if a signal ended it.
    json: the last line on stdout, parsed; None if it is not a JSON object.
    stdout: all of it.
    stderr: all of it.
  """

  rc: int
  json: dict[str, Any] | None
  stdout: str
  stderr: str


def command(*args: object) -> list[str]:
  """Returns the argument vector of `kvgraft ARGS`."""
  script = pathlib.Path(sys.executable).parent / 'kvgraft'
  start = (
      [str(script)]
      if script.exists()
      else [sys.executable, '-m', 'kvgraft_jax.apps.main']
  )
  return start + [str(a) for a in args]


def environment(**env: str | None) -> dict[str, str]:
  """Returns this environment as a user has it; None removes a variable."""
  full = {k: v for k, v in os.environ.items() if k not in _TEST_ONLY}
  full.update({k: v for k, v in env.items() if v is not None})
  return {k: v for k, v in full.items() if env.get(k, v) is not None}


def module_path() -> str:
  """Returns a PYTHONPATH with this `kvgraft_jax` and the tests' modules."""
  return os.pathsep.join([
      str(pathlib.Path(kvgraft_jax.__file__).parents[1]),
      str(pathlib.Path(__file__).parent)])


def run(
    *args: object,
    env: dict[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float = 600,
) -> Result:
  """Runs `kvgraft ARGS` to its end.

  Args:
    *args: command and flags.
    env: changes to the environment; None removes a variable.
    cwd: working directory.
    timeout_s: seconds before the command is killed and the test fails.

  Returns:
    The exit code and output, whatever they are.
  """
  done = subprocess.run(
      command(*args),
      env=environment(**(env or {})),
      cwd=cwd,
      timeout=timeout_s,
      capture_output=True,
      text=True,
      check=False,
  )
  return Result(done.returncode, _last_json(done.stdout), done.stdout,
                done.stderr)


def _last_json(stdout: str) -> dict[str, Any] | None:
  lines = stdout.splitlines()
  try:
    value = json.loads(lines[-1]) if lines else None
  except json.JSONDecodeError:
    return None
  return value if isinstance(value, dict) else None
