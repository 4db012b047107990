"""The README's Python is run as it stands."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _run(tmp_path: pathlib.Path, model: str) -> str:
  text = (ROOT / 'README.md').read_text(encoding='utf-8')
  blocks = re.findall(r'```python\n(.*?)```', text, re.S)
  assert len(blocks) == 6
  code = '\n'.join(blocks)
  assert "'gemma3-270m'" in code
  code = code.replace("'gemma3-270m'", repr(model))
  (tmp_path / 'README.md').write_text(text, encoding='utf-8')
  env = {k: v for k, v in os.environ.items() if not k.startswith('JAX_NUMPY')}
  done = subprocess.run(
      [sys.executable, '-c', code], cwd=tmp_path, env=env, check=False,
      capture_output=True, text=True, timeout=900)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_on_the_tiny_model(tmp_path):
  out = _run(tmp_path, 'tiny:0')
  assert re.search(r'^\d+ restored, 10 computed', out, re.M)
  assert 'sha256_equal=5' in out


@pytest.mark.real
@pytest.mark.slow
def test_as_it_stands(tmp_path):
  out = _run(tmp_path, 'gemma3-270m')
  assert re.search(r'^\d+ restored, 3 computed', out, re.M)
  assert 'sha256_equal=5' in out
