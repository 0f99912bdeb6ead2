#!/bin/sh
# Builds Horovod's wheel, with the environment of $PYTHON, in the folder $TMPDIR. $RECIPE becomes a part of its version.
set -eu
cd "$TMPDIR"

# The variable for GPUs is Horovod's own. The others would change the build, but not the recipe.
gpu=${HOROVOD_GPU_OPERATIONS-}
for name in $(env | sed -n 's/^\(HOROVOD_[A-Z_]*\)=.*/\1/p'); do
    unset "$name"
done
export HOROVOD_GPU_OPERATIONS="$gpu" HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1
PATH=$(dirname "$PYTHON"):$PATH # of cmake and mpicxx
export PATH PYTHONUNBUFFERED=1 # the log shows progress at once

echo 'horovod==0.28.1 --hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0' > source.txt
"$PYTHON" -m pip download --no-deps --no-build-isolation --no-binary :all: -r source.txt
tar -xzf horovod-0.28.1.tar.gz
patch -p1 -d horovod-0.28.1 -i "${0%/*}/horovod-0.28.1.patch"
export HOROVOD_LOCAL_VERSION="$RECIPE" # not for the download, which compares versions
"$PYTHON" -m pip wheel -v --no-deps --no-build-isolation ./horovod-0.28.1
