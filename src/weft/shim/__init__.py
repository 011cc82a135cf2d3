"""The launch shim: a small C library between a program and its GPU driver.

csrc/      the C sources; layout.h is what they share with Python
layout     the shim's memory, as Python sees it; policy_image is a policy in it
binding    reads and writes that memory; nccl_binding calls the shim's functions for NCCL
inject     starts programs under the shim; job_folder is what they share with weft
launch     runs a command with its own signals and exit code; signals passes signals on
stats      what the shim counted, as one JSON document per job
apply      the policy of the running process, from Python
communicators  the CTAs of the running program's collectives, from Python
tracer     spans of kernels and collectives, without a profiler
"""
