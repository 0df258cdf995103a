"""toolchain.py FROM TO SOURCE: a .NET program without a .NET SDK, of what is in two npm packages.

FROM holds them unpacked: `mcp` (@azure/mcp-linux-x64: a program with its whole .NET runtime and Npgsql beside it) and `generator`
(@typespec/http-client-csharp: a generator with Roslyn, the C# compiler, beside it). Puts into TO:
  dotnet/   the runtime, in the folders of an installed one
  app/      SOURCE compiled, with Npgsql and what it needs
  run       starts it
"""

import json
import pathlib
import shutil
import sys

source_folder, target, source = (pathlib.Path(argument).absolute() for argument in sys.argv[1:])
published = source_folder / "mcp/dist"
roslyn = source_folder / "generator/dist/generator"

# The runtime: exactly the files that the program's own list says it took from it.
listed = json.loads((published / "azmcp.deps.json").read_text())
platform = listed["runtimeTarget"]["name"]
pack = "runtimepack.Microsoft.NETCore.App.Runtime.linux-x64/"
key = next(name for name in listed["targets"][platform] if name.startswith(pack))
version = key.removeprefix(pack)
files = listed["targets"][platform][key]
framework = target / "dotnet/shared/Microsoft.NETCore.App" / version
host = target / "dotnet/host/fxr" / version
for folder in (framework, host, target / "app"):
    folder.mkdir(parents=True)
for name in [*files["runtime"], *files["native"]]:
    shutil.copy(published / name, (host if name == "libhostfxr.so" else framework) / name)
del files["native"]["libhostfxr.so"]
name = f"Microsoft.NETCore.App/{version}"
(framework / "Microsoft.NETCore.App.deps.json").write_text(
    json.dumps(
        {
            "runtimeTarget": {"name": platform, "signature": ""},
            "targets": {platform: {name: files}},
            "libraries": {name: {"type": "package", "serviceable": True, "sha512": ""}},
        }
    )
)

# The program's neighbours. The host is asked for the program's name within its own bytes, as an SDK writes it there.
app = target / "app"
for name in ("Npgsql", "Microsoft.Extensions.Logging.Abstractions", "Microsoft.Extensions.DependencyInjection.Abstractions"):
    shutil.copy(published / f"{name}.dll", app)
config = {"runtimeOptions": {"tfm": "net9.0", "framework": {"name": "Microsoft.NETCore.App", "version": version}}}
(app / "Shop.runtimeconfig.json").write_text(json.dumps(config))
starter = (published / "azmcp").read_bytes()
assert starter.count(b"azmcp.dll\0") == 1, "the start program is not what it was"
(app / "Shop").write_bytes(starter.replace(b"azmcp.dll\0", b"Shop.dll\0\0"))
(app / "Shop").chmod(0o755)
(target / "run").write_text(
    '#!/bin/sh\nhere=$(cd "$(dirname "$0")" && pwd)\n'
    'export DOTNET_ROOT="$here/dotnet" DOTNET_SYSTEM_GLOBALIZATION_INVARIANT=1 DOTNET_EnableDiagnostics=0\n'
    'exec "$here/app/Shop" "$@"\n'
)
(target / "run").chmod(0o755)

# The compiler is a library: Python calls it.
import os  # noqa: E402

os.environ["DOTNET_SYSTEM_GLOBALIZATION_INVARIANT"] = "1"
from pythonnet import load  # noqa: E402

load("coreclr", runtime_config=str(app / "Shop.runtimeconfig.json"), dotnet_root=str(target / "dotnet"))
import clr  # noqa: E402

sys.path.append(str(roslyn))
clr.AddReference("Microsoft.CodeAnalysis")
clr.AddReference("Microsoft.CodeAnalysis.CSharp")
from Microsoft.CodeAnalysis import DiagnosticSeverity, MetadataReference, NullableContextOptions, OutputKind, SyntaxTree  # noqa: E402
from Microsoft.CodeAnalysis.CSharp import CSharpCompilation, CSharpCompilationOptions, CSharpSyntaxTree  # noqa: E402
from System import Array  # noqa: E402
from System.IO import File  # noqa: E402

libraries = [*sorted(framework.glob("*.dll")), *sorted(app.glob("*.dll"))]
references = Array[MetadataReference]([MetadataReference.CreateFromFile(str(library)) for library in libraries])
trees = Array[SyntaxTree]([CSharpSyntaxTree.ParseText(source.read_text(), path=str(source))])
options = CSharpCompilationOptions(OutputKind.ConsoleApplication).WithNullableContextOptions(NullableContextOptions.Enable)
compilation = CSharpCompilation.Create("Shop", trees, references, options)
assembly = File.Create(str(app / "Shop.dll"))
result = compilation.Emit(assembly)
assembly.Dispose()
for diagnostic in result.Diagnostics:
    # CS1701: Npgsql was built for an earlier runtime. An SDK says nothing of it either.
    if diagnostic.Id != "CS1701" and diagnostic.Severity in (DiagnosticSeverity.Warning, DiagnosticSeverity.Error):
        print(diagnostic.ToString(), file=sys.stderr)
sys.exit(0 if result.Success else 1)
