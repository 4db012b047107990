"""A model with its numerics: one schedule of steps for all of its contexts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import logging
from typing import Any

import jax
import numpy as np

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import chat
from kvgraft_jax import context as context_lib
from kvgraft_jax import decode
from kvgraft_jax import errors
from kvgraft_jax import experts
from kvgraft_jax import numerics
from kvgraft_jax import programs as programs_lib
from kvgraft_jax import rope
from kvgraft_jax import selftest
from kvgraft_jax import speculation
from kvgraft_jax import streaming as streaming_lib
from kvgraft_jax.checkpoints import resolve

_LOG = logging.getLogger(__name__)
Context = context_lib.Context
Progress = context_lib.Progress
# A padded chunk costs about as much as this share of it in tiles, measured on
# CPU; shorter rests run tile by tile. Equal bits either way.
TILES_BELOW = 0.2


class Model:
  """Weights, tokenizer, numerics and compiled programs.

  Attributes:
    config: the architecture.
    params: weights on the device; experts in bfloat16 are uint16 on the CPU.
    tokenizer: None where the source has none.
    fingerprint: hex, of the weights' content and the config.
    tokenizer_fingerprint: hex or 'none'.
    template_fingerprint: hex or 'none'.
    chat_template: text of the checkpoint's own, or None.
    profile: numerics.
    source: what the model was loaded from.
    capacity: most positions a context may take.
    allow_beyond_trained: whether they may be more than the model was trained
      for; up to 2**24 then.
    programs: compiled steps.
  """

  def __init__(
      self, checkpoint: resolve.Checkpoint, profile: numerics.Profile,
      capacity: int | None = None, allow_beyond_trained: bool = False,
  ):
    self.config = checkpoint.config
    self.params = jax.tree.map(jax.device_put, checkpoint.params)
    if self.config.num_experts and jax.default_backend() == 'cpu':
      self.params = experts.as_bits(self.params)
    self.tokenizer = checkpoint.tokenizer
    self.fingerprint = checkpoint.model_fingerprint
    self.tokenizer_fingerprint = checkpoint.tokenizer_fingerprint
    self.template_fingerprint = checkpoint.template_fingerprint
    self.chat_template = checkpoint.template
    self.source = checkpoint.source
    self.profile = profile
    self.programs = programs_lib.Programs(self.config, profile, self.params)
    self._report: selftest.Report | None = None
    self.allow_beyond_trained = allow_beyond_trained
    self._warned = False
    limit = self.config.max_context
    what = "the model's context"
    hint = '; allow_beyond_trained lets it be longer'
    if allow_beyond_trained:
      limit, what, hint = rope.MAX_POSITION, 'the positions that are exact', ''
    if capacity is not None and not 0 < capacity <= limit:
      raise errors.CapacityError(
          f'capacity: expected 1 to {limit}, {what}, found {capacity}'
          + (hint if capacity > limit else ''))
    self.capacity = capacity or limit

  def __repr__(self) -> str:
    return f'Model({self.source}, {self.profile.dtype})'

  def self_test(self, progress=None) -> selftest.Report:
    """Returns the self-test's report: cached, or run now (seconds)."""
    if self._report is None:
      self._report = selftest.load_or_run(
          self.config, self.profile, self.params, progress)
    return self._report

  @property
  def numerics_class(self) -> dict[str, str]:
    """Factors between whose equal values bits are promised."""
    return numerics.numerics_class(
        self.profile, self.self_test().invariances)

  def context(self) -> Context:
    """Returns an empty context."""
    return Context(self)

  def chat_tokens(
      self, messages: Sequence[dict[str, Any]], *, thinking: bool = False,
      add_generation_prompt: bool = True,
  ) -> list[int]:
    """Returns the token ids of a whole conversation, bos in front.

    The checkpoint's own chat template writes it, or a built-in one of the
    family where there is none.

    Args:
      messages: {'role': ..., 'content': ...} each; a content is a string.
      thinking: let the model think first.
      add_generation_prompt: open the model's turn behind them.

    Raises:
      UsageError: if the model has no tokenizer, the template refuses the
        messages, or it does not know thinking.
    """
    if self.tokenizer is None:
      raise errors.UsageError(
          f'model {self.source!r} has no tokenizer and takes token ids only')
    template = self.chat_template
    extra: dict[str, Any] = {}
    if template is None:
      template, extra = chat.default_template(self.config)
    piece = self.tokenizer.piece

    def text(thinking: bool) -> str:
      return chat.render(
          template, messages, thinking=thinking,
          add_generation_prompt=add_generation_prompt,
          bos=piece(self.tokenizer.bos_id),
          eos=''.join(map(piece, self.tokenizer.eos_ids[:1])), **extra)

    rendered = text(thinking)
    if thinking and rendered == text(False):
      raise errors.UsageError(
          f'thinking: the chat template of {self.source} knows none; leave it'
          ' out')
    return chat.encode(self.tokenizer, rendered)

  def prefill(
      self, tokens: Iterable[int], *, record: bool = True,
      progress: Progress | None = None,
      streaming: streaming_lib.Streaming | None = None,
  ) -> Context:
    """Computes `tokens` from nothing.

    Args:
      tokens: ids, verbatim; the first one is usually bos.
      record: keep sliding rows that leave the ring, on the host, so that the
        context can be deposited with `sliding='full'`.
      progress: called with (positions done, positions in all).
      streaming: keep all but the last positions of the global layers in host
        memory; None for everything on the device.

    Raises:
      UsageError: if there is no token or an id is not one of the model's.
      CapacityError: if they are more than the model's context, or than the
        host memory may take.
      ClassMismatchError: if a streamed context may have other bits here.
    """
    tokens = list(tokens)
    if not tokens:
      raise errors.UsageError(
          'prefill: expected at least one token, found none')
    self.check_streaming(streaming)
    return Context(self, record=record, streaming=streaming).extend(
        tokens, progress=progress)

  def streams_exactly(self) -> bool:
    """Returns whether a streamed context has the bits of one in memory."""
    return bool(self.self_test().invariances.get('stream'))

  def check_streaming(
      self, streaming: streaming_lib.Streaming | None
  ) -> None:
    """Raises ClassMismatchError unless a streamed context would be exact."""
    if streaming is not None and not self.streams_exactly():
      raise errors.ClassMismatchError(
          'the self-test refuted stream on this machine, so a streamed context'
          ' may have other bits; leave out --device_kv_bytes, or graft with'
          ' --on_mismatch=inexact', 'stream')

  def check_tokens(self, tokens: Iterable[int], have: int = 0) -> list[int]:
    """Returns `tokens` as ints, or raises what is wrong with them."""
    result = []
    for i, token in enumerate(tokens):
      if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
        raise errors.UsageError(
            f'tokens[{i}]: expected an integer id, found {token!r:.80}')
      if not 0 <= token < self.config.vocab_size:
        raise errors.UsageError(
            f'tokens[{i}]: expected an id from 0 to'
            f' {self.config.vocab_size - 1}, found {token!r:.80}')
      result.append(int(token))
    length, trained = have + len(result), self.config.max_context
    if length > self.capacity:
      limit = rope.MAX_POSITION if self.allow_beyond_trained else trained
      if self.capacity < limit:
        more = (f' or raise the capacity (the context of {self.config.name} is'
                f' {trained})')
      elif self.allow_beyond_trained:
        more = ' (positions behind it would not be exact)'
      else:
        more = (f" (the capacity is {self.config.name}'s context;"
                ' --allow_beyond_trained lets it be longer)')
      raise errors.CapacityError(
          f'{length} tokens ({have} in the context and {len(result)} more) are'
          f' beyond the capacity of {self.capacity}; take fewer{more}')
    if length > trained and not self._warned:
      self._warned = True
      _LOG.warning(
          'a context of %d positions is beyond the %d that %s was trained for;'
          ' results are as exact as ever, but the text may be of no use',
          length, trained, self.config.name)
    return result

  def rows_for(self, left: int) -> int:
    """Returns the rows of the next step when `left` positions are to run."""
    profile = self.profile
    if left <= max(profile.tile, TILES_BELOW * profile.chunk):
      return profile.tile
    return profile.chunk

  def speculative_rows(self, speculate: int | None = None) -> int:
    """Returns the most rows that a decode step has; 1 is no speculation.

    Args:
      speculate: rows asked for, fewer where fewer are proven; None for the
        default, which never runs the self-test itself.

    Raises:
      UsageError: if fewer than one row is asked for.
    """
    if speculate == 1 or speculate is None and self._report is None:
      return 1
    return speculation.most_rows(
        speculate, self.profile.tile, self.row_counts())

  def row_counts(self) -> list[int]:
    """Returns the proven row counts of a decode step (see `speculation`)."""
    return speculation.row_counts(
        self.profile, self.self_test().invariances)

  def warm_up(
      self, length: int, new: int, *, num_samples: int = 1,
      max_new_tokens: int = 0,
      streaming: streaming_lib.Streaming | None = None,
  ) -> None:
    """Compiles what computing the last `new` of `length` positions runs.

    Of `num_samples` > 1 the batched decode of `max_new_tokens` as well; with
    `streaming` the programs of a streamed context.

    One tile and one head are run, so that the weights are in memory too.
    """
    if streaming is not None:
      streaming_lib.Streamed(
          self.programs, streaming, capacity=self.capacity).warm_up(
          self.params, {self.rows_for(new), self.profile.tile})
      self.programs.run_head(
          self.params, np.zeros((1, self.config.width), np.float32))
      return
    slots, left = self.slots_for(length), new
    while left > 0:
      rows = self.rows_for(left)
      self.programs.step(rows, 1, slots)
      left -= rows
    if num_samples > 1:
      longest = min(length + max_new_tokens, self.capacity)
      shape = self.profile.tile, decode.BATCH, self.slots_for(longest)
      self.programs.step(*shape)
      if self.config.shared_layers:
        self.programs.sharers(*shape)
    cache = self.programs.empty_cache(1, slots)
    hidden, _ = self.programs.run_step(
        self.params, cache, np.zeros((1, self.profile.tile), np.int32),
        np.zeros(1, np.int32))
    self.programs.run_head(self.params, hidden[0])

  def slots_for(self, positions: int) -> int:
    """Returns the cache capacity for a context of `positions`."""
    return cache_lib.slots_for(self.config, self.profile, positions)


def load_model(
    spec: str, *, dtype: str = 'bfloat16', chunk: int | None = None,
    tile: int | None = None, page: int | None = None,
    capacity: int | None = None, allow_beyond_trained: bool = False,
    self_test: bool = True, progress=None,
    check: Callable[[Model], None] | None = None,
) -> Model:
  """Loads a model and settles its numerics.

  The self-test runs once for these shapes, this machine and these versions (a
  minute or so), and is kept in the user's cache directory. Where it refutes
  that a tile's rows equal a chunk's, and no tile was asked for, the tile
  becomes the chunk.

  Args:
    spec: 'gemma3-270m' (the embedded default); the path of a Hugging Face or
      Orbax directory or of a .gguf file; 'tiny:SEED', 'tiny-gemma4-SIZE:SEED'
      or 'random:PRESET:SEED'.
    dtype: 'bfloat16' or 'float32', of weights, operands and cache.
    chunk: rows of a prefill step; None for the device's default.
    tile: rows of a decode step; None for the default.
    page: positions of an attention partial; None for the default.
    capacity: most positions a context may take; None for the model's context.
    allow_beyond_trained: let them be more than the model was trained for, up
      to 2**24, which None is then; one warning is logged.
    self_test: False postpones the self-test until a class is needed.
    progress: called with (case, number, count) while the self-test runs.
    check: called with the model in front of the self-test; may raise.

  Raises:
    UsageError: if a value is not accepted.
    KvgraftError: if the weights cannot be had.
  """
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as e:  # jax raises either.
    raise errors.UsageError(
        f'jax can use no device ({str(e)[:200] or type(e).__name__}); check'
        ' JAX_PLATFORMS, or install the jax that it needs') from None
  programs_lib.enable_compilation_cache()
  checkpoint = resolve.resolve(spec, dtype)
  profile = numerics.profile_for(
      checkpoint.config, dtype, chunk=chunk, tile=tile, page=page)
  model = Model(checkpoint, profile, capacity, allow_beyond_trained)
  if check:
    check(model)
  if self_test and not model.self_test(progress).invariances['tile']:
    if tile is None:
      profile = dataclasses.replace(profile, tile=profile.chunk)
      model = Model(checkpoint, profile, capacity, allow_beyond_trained)
      model.self_test(progress)
  return model
