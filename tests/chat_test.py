"""Templates, messages and ids of conversations."""

import dataclasses
import datetime
import importlib.metadata
import json
import logging
import sys
import threading

import pytest

from kvgraft_jax import chat
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import tokenizer_files
import model_helpers
import tokenizer_writer

BYTES = tokenizer_lib.ByteTokenizer()
USER = {'role': 'user', 'content': ' Hi \n'}
THOUGHT = '<|channel>thought\nhm<channel|>'
MODEL = {'role': 'assistant', 'content': f'{THOUGHT} Yes{THOUGHT}, sir. '}
SYSTEM = {'role': 'system', 'content': ' Be brief. '}


def config(family: str, per_layer_dim: int = 0) -> config_lib.ModelConfig:
  return dataclasses.replace(
      config_lib.TINY, family=family, per_layer_dim=per_layer_dim)


def builtin(
    family: str, *messages: dict, prompt: bool = True, **options
) -> str:
  source, extra = chat.default_template(config(family))
  return chat.render(source, messages, add_generation_prompt=prompt,
                     bos='<bos>', **(extra | options))


def rendered(source: str, *messages: dict, **options) -> str:
  return chat.render(source, messages or [USER], add_generation_prompt=True,
                     bos='<bos>', **options)


def test_gemma3_in_its_own_words():
  assert builtin('gemma3', SYSTEM, USER, MODEL, USER) == (
      '<bos><start_of_turn>user\n Be brief. \n\nHi<end_of_turn>\n'
      f'<start_of_turn>model\n{MODEL["content"].strip()}<end_of_turn>\n'
      '<start_of_turn>user\nHi<end_of_turn>\n'
      '<start_of_turn>model\n')
  assert builtin('gemma3', USER, prompt=False) == (
      '<bos><start_of_turn>user\nHi<end_of_turn>\n')
  assert builtin('gemma3', USER, thinking=True) == builtin('gemma3', USER)


def test_gemma4_in_its_own_words():
  turns = (
      '<|turn>user\nHi<turn|>\n<|turn>model\nYes, sir.<turn|>\n'
      '<|turn>user\nHi<turn|>\n')
  assert builtin('gemma4', SYSTEM, USER, MODEL, USER, prompt=False) == (
      f'<bos><|turn>system\nBe brief.<turn|>\n{turns}')
  assert builtin('gemma4', USER, MODEL, USER, thinking=True) == (
      f'<bos><|turn>system\n<|think|>\n<turn|>\n{turns}<|turn>model\n')
  assert builtin('gemma4', dict(SYSTEM, role='developer'), USER, MODEL, USER,
                 thinking=True) == (
      f'<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n{turns}<|turn>model\n')


def test_a_closed_thought_depends_on_the_size_of_gemma4():
  closed = '<|channel>thought\n<channel|>'
  for per_layer_dim, end in ((0, f'model\n{closed}'), (256, 'model\n')):
    source, extra = chat.default_template(config('gemma4', per_layer_dim))
    assert rendered(source, USER, **extra).endswith(f'<|turn>{end}')
    assert rendered(source, USER, **extra, thinking=True).endswith(
        '<|turn>model\n')
  assert chat.default_template(config('gemma3'))[1] == {}
  with pytest.raises(errors.UsageError, match="family 'gemma2'"):
    chat.default_template(config('gemma2'))


@pytest.mark.parametrize('family', ['gemma3', 'gemma4'])
def test_parts_are_joined_and_a_conversation_is_a_prefix_of_its_next(family):
  parts = [{'type': 'text', 'text': ' a '}, {'type': 'text', 'text': 'b\n'}]
  assert builtin(family, dict(USER, content=parts)) == builtin(
      family, dict(USER, content='ab'))
  messages = [SYSTEM, USER, MODEL, dict(USER, content=''), MODEL, USER]
  whole = builtin(family, *messages)
  for count in range(2, len(messages) + 1):
    assert whole.startswith(builtin(family, *messages[:count], prompt=False))


@pytest.mark.parametrize('family, messages, found', [
    ('gemma3', [MODEL], 'expected user, found assistant at message 0'),
    ('gemma3', [SYSTEM, USER, USER], 'expected model, found user at message 2'),
    ('gemma3', [USER, MODEL, SYSTEM], 'found system at message 2'),
    ('gemma3', [SYSTEM], 'expected a user message, found none'),
    ('gemma4', [USER, dict(USER, role='tool')], 'found tool at message 1'),
    ('gemma4', [SYSTEM, USER, SYSTEM], 'found system at message 2'),
    ('gemma3', [dict(USER, content=[{'type': 'image'}])], 'of type image'),
    ('gemma4', [dict(USER, content=[{'type': 'image'}])], 'of type image'),
])
def test_builtin_templates_refuse(family, messages, found):
  with pytest.raises(errors.UsageError, match=found):
    builtin(family, *messages)


def test_the_engine_is_set_up_as_templates_expect():
  assert rendered(
      '  {% for m in messages %}\n{{ m.role }}\n  {% break %}\n'
      '  {% endfor %}\nend') == 'user\nend'
  assert rendered("{{ {'b': 'é<', 'a': 1} | tojson }}") == '{"b": "é<", "a": 1}'
  assert rendered('{{ [1] | tojson(indent=1) }}') == '[\n 1\n]'
  assert rendered(
      '{{ tools }}{{ documents }}{{ enable_thinking }}{{ bos_token }}'
      '{{ eos_token }}{{ add_generation_prompt }}{{ more }}',
      eos='<eos>', more=3, thinking=True) == 'NoneNoneTrue<bos><eos>True3'
  assert rendered("{{ '<' }}&") == '<&'
  assert rendered(
      '{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}'
      '{% endgeneration %}{{ x }}') == '21'


def test_the_time_in_a_prompt_is_pointed_out_once(caplog):
  with caplog.at_level(logging.WARNING, 'kvgraft_jax.chat'):
    year = rendered("{{ strftime_now('%Y') }}{{ strftime_now('') }}")
  assert year == str(datetime.date.today().year)
  assert [r.getMessage()[:40] for r in caplog.records] == [
      'the chat template writes the time into t']


@pytest.mark.parametrize('source, found', [
    ('a\n{% for %}', 'failed at line 2: TemplateSyntaxError'),
    ('{% include "/etc/passwd" %}', 'failed: TypeError: no loader'),
    ('{{ missing.name }}', "UndefinedError: 'missing' is undefined"),
    ('{{ 1 / 0 }}', 'ZeroDivisionError'),
    ("{{ 'a' + 1 }}", 'TypeError'),
    ("{{ ''.__class__.__mro__ }}", 'SecurityError'),
    ("{{ raise_exception.__globals__['os'] }}", 'SecurityError'),
    ("{{ namespace.__init__('x') }}", 'SecurityError'),
    ('{{ messages.append(1) }}', 'SecurityError'),
    ("{{ messages[0].update({'role': 'x'}) }}", 'SecurityError'),
    ('{{ 9 ** 9 ** 9 ** 9 }}', r'SecurityError: the operator \*\*'),
    ('{% for i in range(10000000) %}{% endfor %}', 'OverflowError: Range too'),
    ('{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}', 'RecursionError'),
    ("{{ raise_exception('no\n  way') }}", 'refuses the messages: no way; c'),
])
def test_a_bad_template_is_one_clear_line(source, found):
  with pytest.raises(errors.UsageError, match=found) as caught:
    rendered(source)
  assert '\n' not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize('version, found', [
    ('3.1.5', 'need jinja2 3.1.6 or later, found 3.1.5: pip install'),
    (None, 'need jinja2 3.1.6 or later, found none: pip install'),
])
def test_jinja2_missing_or_too_old_is_one_clear_line(
    monkeypatch, version, found
):
  chat._environment.cache_clear()
  if version:
    monkeypatch.setattr(importlib.metadata, 'version', lambda _: version)
  else:
    monkeypatch.setitem(sys.modules, 'jinja2', None)
    monkeypatch.setitem(sys.modules, 'jinja2.ext', None)
  with pytest.raises(errors.MissingDependencyError, match=found):
    rendered('x')


def test_an_endless_template_is_stopped(monkeypatch):
  monkeypatch.setattr(chat, '_RENDER_S', 0.2)
  loops = ('{% for i in range(99999) %}' * 3) + ('{% endfor %}' * 3)
  tracer = sys.gettrace()
  failures = []

  def attempt():
    try:
      rendered(loops)
    except errors.UsageError as e:
      failures.append(str(e))

  attempt()
  thread = threading.Thread(target=attempt)
  thread.start()
  thread.join()
  assert len(failures) == 2
  assert all('TimeoutError: not done after 0.2 s' in f for f in failures)
  assert sys.gettrace() is tracer
  assert rendered('still {{ 1 + 1 }}') == 'still 2'


def test_messages_in_both_forms():
  messages = [USER, dict(USER, content=[{'type': 'text', 'text': 'x'}])]
  for value in (messages, {'messages': messages}):
    assert chat.parse_messages(json.dumps(value), 'here') == messages
  with pytest.raises(errors.UsageError, match='^here: message 1: expected a r'):
    chat.parse_messages(json.dumps([USER, {'content': ''}]), 'here')


def test_encode_puts_exactly_one_bos():
  assert chat.encode(BYTES, '<bos>a') == chat.encode(BYTES, 'a') == [2, 4 + 97]
  assert chat.encode(BYTES, '') == [2]
  for text in ('<bos><bos>a', '<bos>'*3):
    with pytest.raises(errors.UsageError, match='a second bos'):
      chat.encode(BYTES, text)


def test_tail():
  front = BYTES.encode('abc', add_bos=True)
  whole = BYTES.encode('abcde', add_bos=True)
  assert chat.tail(BYTES, whole, front) == whole[4:]
  assert chat.tail(BYTES, front, front) == []
  assert chat.tail(BYTES, whole, []) == whole
  with pytest.raises(errors.UsageError, match=(
      "at position 4 of 6: expected '<bos>abcde', found '<bos>abc'; .*"
      ' --length=4 to keep')):
    chat.tail(BYTES, front, whole)
  with pytest.raises(errors.UsageError) as caught:
    chat.tail(BYTES, whole, [3])
  assert '--length' not in str(caught.value)


def check_prefixes(tokenizer, family):
  """A stored conversation's ids begin those of the next, whatever the texts."""
  texts = ['\n\nHi\n\n', '', '  two  blanks', '日本🙂', '1\n2\n']
  messages = [
      {'role': ('user', 'assistant')[i % 2], 'content': text}
      for i, text in enumerate(texts)]
  whole = chat.encode(tokenizer, builtin(family, *messages))
  for count in range(1, len(messages) + 1):
    part = chat.encode(
        tokenizer, builtin(family, *messages[:count], prompt=False))
    assert part[-2:] == [106, 107]  # Turn end, newline.
    assert len(chat.tail(tokenizer, whole, part)) == len(whole) - len(part) > 0


def test_ids_of_gemma4(tmp_path):
  tokenizer_writer.write_gemma4(tmp_path)
  tokenizer = tokenizer_files.load(tmp_path)

  def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_bos=False)

  user = [105, *encode('user'), 107, *encode('Hello'), 106, 107]
  system = [105, *encode('system'), 107, 98, 107, *encode('The'), 106, 107]
  opening = [105, *encode('model'), 107]
  hello = {'role': 'user', 'content': 'Hello'}
  the = {'role': 'system', 'content': 'The'}
  assert chat.encode(tokenizer, builtin('gemma4', hello)) == [
      2, *user, *opening, 100, *encode('thought'), 107, 101]
  assert chat.encode(tokenizer, builtin(
      'gemma4', the, hello, thinking=True)) == [2, *system, *user, *opening]
  assert set(tokenizer.eos_ids) == {1, 50, 106}
  check_prefixes(tokenizer, 'gemma4')
  with pytest.raises(errors.UsageError, match='a second bos'):
    chat.encode(tokenizer, builtin('gemma4', dict(hello, content='a<bos>')))


@pytest.mark.real
def test_ids_of_gemma3_with_the_real_vocabulary():
  tokenizer = model_helpers.real().tokenizer
  text = 'The capital of France is'
  user = {'role': 'user', 'content': text}
  assert chat.encode(tokenizer, builtin('gemma3', user)) == [
      2, 105, 2364, 107, 818, 5279, 529, 7001, 563, 106, 107, 105, 4368, 107]
  check_prefixes(tokenizer, 'gemma3')
  with pytest.raises(errors.UsageError, match='a second bos'):
    chat.encode(tokenizer, builtin('gemma3', dict(user, content='a<bos>')))


def test_a_template_is_not_computed_while_it_is_compiled():
  code = chat._environment().compile("{{ 'a' * 9999999 }}", raw=True)
  assert len(code) < 10_000
  assert chat.render("{{ 'a' * 99 }}", [USER], add_generation_prompt=True,
                     bos='') == 'a' * 99


def test_compiling_counts_as_rendering(monkeypatch):
  monkeypatch.setattr(chat, '_RENDER_S', 0.01)
  with pytest.raises(errors.UsageError, match='TimeoutError: not done after'):
    chat.render('{{ 1 }}{# #}' * 50_000, [USER], add_generation_prompt=True,
                bos='')
