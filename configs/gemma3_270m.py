r"""The real Gemma 3 270M of the extra `demo`, in bfloat16.

    kvgraft deposit --config=configs/gemma3_270m.py \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma3_270m.py \
        --store=/tmp/store --artifact=manual --continuations=50

Expected of `verify`: `sha256_equal` 50, `argmax_agree` 50, `max_kl` 0.0,
`greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma3-270m --context=32768` says on CPU:
  268,098,176 parameters, 536,308,224 bytes of weights;
  18,432 bytes of K and V a token: 15,360 sliding, 3,072 global;
  133,693,440 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma3-270m', 'dtype': 'bfloat16', 'capacity': 32768}
