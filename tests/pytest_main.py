"""Entry of the py_test rules: runs pytest on the files given."""

import sys

import pytest

if __name__ == '__main__':
  sys.exit(pytest.main(sys.argv[1:]))
