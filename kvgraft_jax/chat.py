"""Conversations to text and token ids, by a checkpoint's chat template.

Templates come with checkpoints, so they run in a sandbox and for a limited
time. `data/templates` has one a family for checkpoints without their own.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import datetime
import functools
import importlib.metadata
import json
import logging
import pathlib
import re
import sys
import time
from typing import Any

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors

_LOG = logging.getLogger(__name__)
_TEMPLATES = pathlib.Path(__file__).parent / 'data' / 'templates'
_FAMILIES = ('gemma3', 'gemma4')
# Earlier ones have known ways out of the sandbox.
_JINJA = (3, 1, 6)
_RENDER_S = 20.0
# Tokens shown on each side of a difference.
_AROUND = 8


def parse_messages(text: str, where: str) -> list[dict[str, Any]]:
  """Returns the messages of a JSON text, checked.

  Which roles there are and in what order is the template's to say.

  Args:
    text: a JSON list of {"role", "content"}, or {"messages": that list};
      content is a string or a list of {"type": "text", "text"}.
    where: what names the text in errors.

  Raises:
    UsageError: if it is anything else, images and audio included.
  """
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as e:
    raise errors.UsageError(
        f'{where}: expected a JSON list of messages, found no JSON'
        f' ({e!s:.80}); correct the file') from None
  if isinstance(value, dict) and 'messages' in value:
    _only_keys(value, ('messages',), where)
    value = value['messages']
  if not isinstance(value, list) or not value:
    raise errors.UsageError(
        f'{where}: expected a JSON list with at least one message, found'
        f' {"an empty list" if value == [] else type(value).__name__}; give'
        ' [{"role": "user", "content": "..."}]')
  for i, message in enumerate(value):
    _check_message(message, f'{where}: message {i}')
  return value


def _check_message(message: Any, where: str) -> None:
  _require(message, dict, where, 'an object with role and content')
  _only_keys(message, ('role', 'content'), where)
  role, content = message.get('role'), message.get('content')
  _require(role or None, str, where, 'a role such as "user"')
  if isinstance(content, str):
    return
  _require(content, list, where, 'content that is a string or a list of parts')
  for part in content:
    _require(part, dict, where, 'parts that are objects')
    if part.get('type') != 'text':
      raise errors.UsageError(
          f'{where}: expected parts of type "text", found'
          f' {part.get("type")!r:.40}; this is a text model: remove the part')
    _only_keys(part, ('type', 'text'), where)
    _require(part.get('text'), str, where, 'a text in each part')


def _require(value: Any, kind: type, where: str, expected: str) -> None:
  if not isinstance(value, kind):
    raise errors.UsageError(
        f'{where}: expected {expected}, found'
        f' {"none" if value is None else type(value).__name__}; correct the'
        ' file')


def _only_keys(value: dict[str, Any], keys: Sequence[str], where: str) -> None:
  for key in value:
    if key not in keys:
      raise errors.UsageError(
          f'{where}: expected only {" and ".join(keys)}, found {key!r:.40};'
          ' remove it')


def default_template(
    config: config_lib.ModelConfig,
) -> tuple[str, dict[str, Any]]:
  """Returns the built-in template of a family, and variables for `render`.

  Raises:
    UsageError: if the family has none.
  """
  family = config.family
  if family not in _FAMILIES:
    raise errors.UsageError(
        f'no chat template for the family {family!r}, expected one of'
        f' {", ".join(_FAMILIES)}; put chat_template.jinja beside the'
        ' checkpoint')
  source = (_TEMPLATES / f'{family}.jinja').read_text(encoding='utf-8')
  if family == 'gemma3':
    return source, {}
  # Of Gemma 4, the sizes with per-layer embeddings were trained without it.
  return source, {'closed_thought': not config.per_layer_dim}


def render(
    template: str, messages: Sequence[dict[str, Any]], *,
    thinking: bool = False, add_generation_prompt: bool, bos: str,
    eos: str = '', **extra: Any,
) -> str:
  """Returns the text of a conversation.

  Args:
    template: Jinja source, as Hugging Face's `chat_template.jinja`.
    messages: as from `parse_messages`.
    thinking: the template's `enable_thinking`.
    add_generation_prompt: end with the opening of the model's turn.
    bos: text of the bos token, which templates write themselves.
    eos: text of the eos token.
    **extra: further variables of the template.

  Raises:
    UsageError: if the template is broken, refuses the messages, or tries what
      the sandbox forbids.
    MissingDependencyError: if jinja2 is missing or too old.
  """
  _environment()  # Here, since what it raises is no fault of the template.
  import jinja2  # pylint: disable=g-import-not-at-top
  try:
    with _time_limit(_RENDER_S):
      return _compile(template).render({
          'messages': messages, 'tools': None, 'documents': None,
          'add_generation_prompt': add_generation_prompt,
          'enable_thinking': thinking, 'bos_token': bos, 'eos_token': eos,
          'strftime_now': _clock(), **extra})
  except Exception as e:  # Whatever the template's code does.
    found = f'{" ".join(str(e).split()):.200}'
    if type(e) is jinja2.TemplateError:  # By raise_exception.
      raise errors.UsageError(
          f'the chat template refuses the messages: {found}; correct them'
      ) from None
    line = f' at line {e.lineno}' if isinstance(
        e, jinja2.TemplateSyntaxError) else ''
    raise errors.UsageError(
        f'the chat template failed{line}: {type(e).__name__}: {found}; correct'
        ' the template, or messages that it does not expect') from None


@functools.lru_cache(16)
def _compile(template: str) -> Any:
  return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
  """Returns a sandbox that knows what transformers' templates may use."""
  try:
    version = importlib.metadata.version('jinja2')
    import jinja2.ext  # pylint: disable=g-import-not-at-top
    import jinja2.sandbox  # pylint: disable=g-import-not-at-top
  except ImportError:
    version = '0'
  if tuple(map(int, re.findall(r'\d+', version)[:3])) < _JINJA:
    needed = '.'.join(map(str, _JINJA))
    raise errors.MissingDependencyError(
        f'chat templates need jinja2 {needed} or later, found'
        f' {"none" if version == "0" else version}: pip install'
        f" 'jinja2>={needed}'")

  class Generation(jinja2.ext.Extension):
    """A tag that marks the model's words, for training alone."""

    tags = {'generation'}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return jinja2.nodes.Scope(body).set_lineno(line)

  class Unfolded(jinja2.compiler.CodeGenerator):
    """Leaves constants to the run: a long one takes minutes to compile."""

    def _output_child_to_const(
        self, node: Any, frame: Any, finalize: Any) -> str:
      if not isinstance(node, jinja2.nodes.TemplateData):
        raise jinja2.nodes.Impossible
      return super()._output_child_to_const(node, frame, finalize)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  def power(*unused: Any) -> None:
    raise jinja2.sandbox.SecurityError('the operator ** is not allowed')

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, optimized=False,
      extensions=['jinja2.ext.loopcontrols', Generation])
  # A tower of powers never ends, and no time limit reaches into it.
  environment.intercepted_binops = frozenset({'**'})
  environment.code_generator_class = Unfolded
  environment.binop_table['**'] = power
  environment.filters['tojson'] = to_json
  environment.globals['raise_exception'] = raise_exception
  return environment


def _clock() -> Callable[[str], str]:
  """Returns the templates' `strftime_now`, which is pointed out once."""
  noted = False

  def strftime_now(form: str) -> str:
    nonlocal noted
    if not noted:
      noted = True
      _LOG.warning(
          'the chat template writes the time into the prompt: artifacts of one'
          ' conversation differ as it passes, and are not found again')
    return datetime.datetime.now().strftime(form)

  return strftime_now


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
  """Raises TimeoutError in Python code that runs longer."""
  deadline = time.monotonic() + seconds

  def check(*unused: Any) -> Any:
    if time.monotonic() > deadline:
      raise TimeoutError(f'not done after {seconds:g} s')
    return check

  # Unlike a signal this works in every thread and on every system.
  before = sys.gettrace()
  sys.settrace(check)
  try:
    yield
  finally:
    sys.settrace(before)


def encode(tokenizer: Any, text: str) -> list[int]:
  """Returns the ids of a rendered text, with exactly one bos, in front.

  Args:
    tokenizer: of the model.
    text: as from `render`, with or without the text of bos in front.

  Raises:
    UsageError: if there is a second bos.
  """
  bos = tokenizer.piece(tokenizer.bos_id)
  rest = text.removeprefix(bos)
  ids = tokenizer.encode(rest, add_bos=True)
  # Not every tokenizer reads bos in a text as a token.
  if rest.startswith(bos) or tokenizer.bos_id in ids[1:]:
    raise errors.UsageError(
        f'a second bos ({bos}, id {tokenizer.bos_id}) in the conversation;'
        ' remove it from the messages or the chat template')
  return ids


def tail(
    tokenizer: Any, ids: Sequence[int], front: Sequence[int], *,
    length_flag: str = '--length',
) -> list[int]:
  """Returns the ids of a conversation that follow those already stored.

  Args:
    tokenizer: for the texts in an error.
    ids: of the whole conversation.
    front: of the stored positions, from 0.
    length_flag: the flag that stores fewer positions in front, for an error.

  Raises:
    UsageError: unless `ids` begin with `front`.
  """
  front = list(front)
  if list(ids[:len(front)]) == front:
    return list(ids[len(front):])
  at = next((i for i, pair in enumerate(zip(ids, front)) if pair[0] != pair[1]),
            len(ids))

  def around(tokens: Sequence[int]) -> str:
    shown = tokens[max(0, at - _AROUND):at + _AROUND]
    return repr(tokenizer.decode(shown, show_special=True))

  # Two conversations share bos and the opening of a turn whatever they say.
  shared = f', or {length_flag}={at} to keep what they share'
  raise errors.UsageError(
      f'the conversation differs from the artifact at position {at} of'
      f' {len(front)}: expected {around(front)}, found {around(ids)}; give the'
      ' whole conversation with the same --thinking'
      + (shared if at > 1 else ', or an artifact that is its beginning'))
