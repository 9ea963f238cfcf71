// The CUDA toolkit that this library was built with, as text that torchsparse_rec/_library.py finds in the file before
// it loads it: a driver that is too old for the toolkit must be told, not met.
#include <cuda_runtime_api.h>

#define TSR_TEXT_OF(x) #x
#define TSR_TEXT(x) TSR_TEXT_OF(x)

extern "C" __attribute__((used, visibility("default"))) const char torchsparse_rec_cuda_toolkit[] =
    "torchsparse_rec CUDA toolkit " TSR_TEXT(CUDART_VERSION);
