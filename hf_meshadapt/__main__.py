"""`python -m hf_meshadapt` is `meshadapt`."""

import sys

from .cli.main import main

sys.exit(main())
