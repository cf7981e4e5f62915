"""From device code to a launch: NVRTC or nvcc, a cache of cubins, the CUDA driver.

Everything is found at run time by dlopen. Compiling needs no GPU, no driver and no CUDA toolkit.
"""
