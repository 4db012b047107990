"""Continues a text, computed from nothing and without a store."""

from __future__ import annotations

from typing import Any

from absl import flags as absl_flags

import kvgraft_jax
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import continuation
from kvgraft_jax.apps import flags
from kvgraft_jax.apps import inputs

EXAMPLE = "--prompt='The capital of France is' --max_new_tokens=24"


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.text(fv)
  flags.messages(fv)
  flags.sampling(fv)
  flags.stream(fv)
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Generates; returns exit code and JSON."""
  options = continuation.Options.of(args)
  streaming = common.streaming(args)
  what = inputs.require_request(args)
  model = common.load_model(args)
  ids = inputs.to_ids(args, model, what, 0)
  model.warm_up(len(ids), len(ids), num_samples=args.num_samples,
                max_new_tokens=args.max_new_tokens, streaming=streaming)
  startup_s = common.process_age_s()

  def build() -> kvgraft_jax.Context:
    with common.Progress('prefill') as bar:
      return model.prefill(ids, record=False, streaming=streaming,
                           progress=bar.callback)

  _, result = continuation.answer(options, build, [])
  return 0, result | inputs.about(what) | {
      'exact': None, 'startup_s': round(startup_s, 3)}


if __name__ == '__main__':
  cli.start('generate')
