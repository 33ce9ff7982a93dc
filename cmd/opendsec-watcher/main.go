// Opendsec-watcher runs one server; its configuration is the file that opendsec
// init writes as watcher.json.
package main

import (
	"os"

	"github.com/kernflux/opendsec/internal/program"
)

func main() { os.Exit(program.Main(&program.Watcher{}, os.Args[1:])) }
