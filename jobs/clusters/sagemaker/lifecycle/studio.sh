#!/bin/bash
# Sets the workshop up in a JupyterLab space of SageMaker Studio, each time that the space starts.
#
# It must return within five minutes, so the set-up goes on behind it: ten minutes the first time, no time later, since
# the home folder stays when the space is stopped. The kernel "Workshop" is there once workshop-set-up.log says so.
set -eu
REPOSITORY="${REPOSITORY:-https://example.org/workshop.git}" # put here where git finds the workshop
FOLDER="${FOLDER:-$HOME}"
export REPOSITORY FOLDER

nohup bash -eu > "$FOLDER/workshop-set-up.log" 2>&1 <<'SET_UP' &
sudo apt-get update -qq # what the system has is new with each start, so this is not kept
sudo apt-get install -y -qq --no-install-recommends g++ git iproute2 make patch
cd "$FOLDER"
test -d workshop || git clone "$REPOSITORY" workshop
cd workshop
make setup
.venv/bin/workshop copy-lessons my_lessons
.venv/bin/python -m ipykernel install --user --name workshop --display-name Workshop --env PATH "$PWD/.venv/bin:$PATH"
echo "The workshop is set up: open a lesson in workshop/my_lessons and choose the kernel Workshop."
SET_UP
