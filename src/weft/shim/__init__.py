"""The launch shim: a small C library between a program and its GPU driver.

csrc/      the C sources; layout.h defines the memory layout shared with Python
layout     mirrors layout.h in ctypes; policy_image encodes and decodes a policy in that memory
binding    reads and writes that memory; nccl_binding calls the shim's functions for NCCL
inject     starts programs under the shim; job_folder is the folder they share with weft
launch     runs a command with its own signals and exit code; signals forwards signals
stats      the shim's counters, as one JSON document per job
apply      changes the policy of the running process from Python
communicators  changes the CTAs of the running program's collectives from Python
tracer     records spans of kernels and collectives without a profiler
"""
