/* The size of each exported function's struct. Python calls no function whose struct has another size there. */
#ifndef MEGATRAIN_ARGUMENT_H
#define MEGATRAIN_ARGUMENT_H

#include <stdint.h>

/* Exports FUNCTION_size, which host_function in megatrain/ops/extension.py reads. */
#define ARGUMENT_OF(function, type) const int64_t function##_size = sizeof(type)

#endif
