"""Compares grafts of an artifact with a fresh computation, byte for byte."""

import dataclasses
import time
from typing import Any

from absl import flags as absl_flags

import kvgraft_jax
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '--store=/tmp/store --artifact=manual --continuations=50'


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.artifact(fv)
  absl_flags.DEFINE_integer(
      'continuations', 50, 'How many tails to compare.', lower_bound=1,
      flag_values=fv)
  flags.on_mismatch(fv, ('fail', 'inexact'))
  flags.stream(fv)
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Verifies; returns exit code and JSON."""
  flags.require(args, 'artifact')
  streaming = common.streaming(args)
  store = common.open_store(args)
  manifest = store.find(args.artifact)
  model = common.load_model(
      args, manifest if args.on_mismatch == 'fail' else None)
  began = time.perf_counter()
  with common.Progress('verify') as bar:
    report = kvgraft_jax.verify(
        model, store, manifest, n_continuations=args.continuations,
        length=args.length, on_mismatch=args.on_mismatch, streaming=streaming,
        progress=bar.callback)
  n = report.continuations
  common.note(
      f'{manifest.id[:12]} [0, {report.length}): SHA-256 equal'
      f' {report.sha256_equal} of {n}, argmax {report.argmax_agree} of {n},'
      f' largest KL {report.max_kl}, greedy tokens'
      f' {report.greedy_tokens_equal} of {report.greedy_tokens}: '
      + ('all equal' if report.ok else 'NOT EQUAL'))
  return int(not report.ok), dataclasses.asdict(report) | {
      'ok': report.ok, 'artifact': manifest.id,
      'verify_s': round(time.perf_counter() - began, 3)}


if __name__ == '__main__':
  cli.start('verify')
