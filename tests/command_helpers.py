"""Runs commands in this process, with models kept from one to the next."""

import contextlib
import io
import json
import pathlib

import pytest

import cli_helpers
from kvgraft_jax import grafting
from kvgraft_jax.apps import common
from kvgraft_jax.apps import main

TINY = '--model=tiny:0'


@contextlib.contextmanager
def kept_models():
  """Keeps loaded models, so that a program is compiled once."""
  load, models = common.load_model, {}

  def load_once(args, manifest=None):
    key = tuple(getattr(args, name) for name in (
        'model', 'dtype', 'chunk', 'tile', 'page', 'capacity',
        'allow_beyond_trained', 'threads'))
    if key not in models:
      models[key] = load(args, manifest)
    elif manifest is not None:
      grafting.check_early(models[key], manifest)
    return models[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(common, 'load_model', load_once)
    patch.delenv('KVGRAFT_TRACEBACK', raising=False)
    yield


def call(*args: object) -> cli_helpers.Result:
  """Runs `kvgraft ARGS` here."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    rc = main.main([str(a) for a in args])
  lines = out.getvalue().splitlines()
  try:
    value = json.loads(lines[-1]) if lines else None
  except ValueError:
    value = None
  return cli_helpers.Result(
      rc, value if isinstance(value, dict) else None, out.getvalue(),
      err.getvalue())


def ok(*args: object) -> dict:
  """Runs a command that must succeed; returns its JSON."""
  result = call(*args)
  assert result.rc == 0, result.stderr
  assert result.json is not None
  return result.json


def refusal(rc: int, *args: object) -> str:
  """Runs a command that must fail; returns its one line on stderr."""
  result = call(*args)
  assert result.rc == rc, (result.rc, result.stdout, result.stderr)
  assert result.stdout == ''
  lines = result.stderr.splitlines()
  assert len(lines) == 1 and lines[0].startswith(f'kvgraft {args[0]}: '), lines
  assert len(lines[0]) < 700
  return lines[0]


def snapshot(root: pathlib.Path) -> dict[str, bytes | None]:
  """Returns every path below `root` -> its bytes, None for a directory."""
  return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None
          for p in sorted(root.rglob('*'))}
