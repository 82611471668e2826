"""The fused loss head on Hopper GPUs (sm_90), in bf16.

``loss_head.cu``  the GEMM and its epilogues      ``module``  compiles and launches it
``ptx.cuh``       the instructions it is made of
``head``          forward and backward, dW        ``call``    a call's rows and its tiles of rows
``plan``          how much at a time              ``rows``    work per row, in Triton
"""
