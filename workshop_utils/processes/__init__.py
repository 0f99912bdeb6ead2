"""Starts, watches and ends every process that anything here starts.

- `supervisor`: a small program that owns the processes of one run and ends them, whatever happens;
- `group`: this side of it: describe processes, start them under a supervisor, hear what they do;
- `warm`: a server that has imported a framework already, from which ranks fork in milliseconds; `warm_server` is what
  it runs, a part of the supervisor;
- `imports`: what a script imports, by which `warm` knows whether it can be forked;
- `ports`: ports that no other launch on this machine will take.

The supervisor and what it imports run without the rest of the package.
"""
