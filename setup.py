"""Builds the optional extensions; everything else is in pyproject.toml.

`_C_cpu` and `_C_schemas` (docs/export.md) need a C++ compiler, `_C_cuda` needs nvcc. All use LibTorch's stable ABI at target
2.11, so that one binary serves torch 2.11 and later and any Python. A missing compiler leaves a package that works without
them; MOELORA_REQUIRE_CPP=1 and MOELORA_REQUIRE_CUDA=1 turn that into an error.
"""

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FEATURES = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]  # 2.11
NVCC = shutil.which(os.environ.get("NVCC", "nvcc"))
ARCHITECTURES = os.environ.get("MOELORA_CUDA_ARCHS", "80;90;100").split(";")


def torch_root():
    """Folder of the torch to build against: importable here, or in the target environment behind pip's build isolation."""
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    candidates += [Path(sysconfig.get_path(key)) / "torch" for key in ("platlib", "purelib")]
    return next((c for c in candidates if (c / "include/torch/csrc/stable/library.h").is_file()), None)


class BuildExt(build_ext):
    """Hands CUDA sources to nvcc; torch's own CUDAExtension refuses to build beside a CPU torch."""

    def build_extension(self, ext):
        if not any(source.endswith(".cu") for source in ext.sources):
            return super().build_extension(ext)
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [NVCC, "-shared", "-O3", "-std=c++17", "-DUSE_CUDA", *FEATURES, "-cudart", "static"]
        command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
        command += ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-lineinfo"]
        for folder in ext.include_dirs:
            command += ["-isystem", folder]
        command += [*ext.sources, "-o", str(output), *(f"-L{d}" for d in ext.library_dirs)]
        command += ["-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu"]
        try:
            subprocess.check_call(command)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(str(error)) from error


def extensions(root):
    include, library = [f"{root}/include"], [f"{root}/lib"]
    found = [
        Extension(
            f"moelora_ops._C_{folder}",
            sorted(glob(f"csrc/{folder}/*.cpp")),
            depends=glob(f"csrc/{folder}/*.h"),
            language="c++",
            py_limited_api=True,
            optional=os.environ.get("MOELORA_REQUIRE_CPP") != "1",
            include_dirs=include,
            library_dirs=library,
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-fopenmp-simd", *FEATURES],
            extra_link_args=["-ltorch_cpu", "-s"],
        )
        for folder in ("cpu", "schemas")
    ]
    if NVCC and os.environ.get("MOELORA_CUDA", "1") != "0":
        found.append(
            Extension(
                "moelora_ops._C_cuda",
                sorted(glob("csrc/cuda/*.cu")),
                depends=[*glob("csrc/cuda/*.cuh"), *glob("csrc/cuda/*.h")],
                language="c++",
                py_limited_api=True,
                optional=os.environ.get("MOELORA_REQUIRE_CUDA") != "1",
                include_dirs=include,
                library_dirs=library,
            )
        )
    return found


root = torch_root()
modules = [] if root is None else [e for e in extensions(root) if e.sources]
setup(
    setup_requires=[] if root else ["torch>=2.11,<2.14"],
    ext_modules=modules,
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if modules else {},
)
