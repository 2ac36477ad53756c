#!/bin/bash
# Two hosts with four ranks each. The coordinator listens on the host of rank 0.
export JAXRING_SECRET=$(openssl rand -hex 16)
export JAXRING_COORDINATOR=h0:5000
mpirun -n 8 --host h0:4,h1:4 -x JAXRING_SECRET -x JAXRING_COORDINATOR python train.py
