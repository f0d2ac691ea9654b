#!/bin/bash
# The interpreter of the kit's SGLang, as `engine.python`: an engine host gives a server no PYTHONPATH of its own, so it gets the kit's here.
HERE=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$HERE/stand_ins:${KIT_WORK:?is set by start.sh}/site
exec python3 "$@"
