"""The bundled tiny language model, problems with answers, and the scripts that made them.

See README.md.
"""

import sys

# transformers imports these if they are installed, and builds for another torch then fail; nothing
# here needs them.
[sys.modules.setdefault(name, None) for name in ("torchvision", "torchaudio", "torchcodec")]  # type: ignore[arg-type]
