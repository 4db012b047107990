r"""Gemma 4 E4B from a checkpoint, in bfloat16.

    kvgraft deposit --config=configs/gemma4_e4b.py --model=DIR \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma4_e4b.py --model=DIR \
        --store=/tmp/store --artifact=manual --continuations=50

DIR is a Hugging Face or Orbax directory or a GGUF file; without the flag it is
./gemma4-e4b. Expected of `verify`: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma4-e4b --context=32768` says on CPU:
  7,463,013,418 parameters, 14,927,147,176 bytes of weights;
  57,344 bytes of K and V a token: 40,960 sliding, 16,384 global;
  1,157,627,904 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma4-e4b', 'dtype': 'bfloat16', 'capacity': 32768}
