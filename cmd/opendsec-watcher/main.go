// Opendsec-watcher runs one server; its configuration is the file that opendsec
// init writes as watcher.json.
package main

import (
	"os"

	"github.com/kernflux/opendsec/internal/program"
	"github.com/kernflux/opendsec/internal/program/runwatcher"
)

func main() { os.Exit(program.Main(&runwatcher.Server{}, os.Args[1:])) }
