// Opendsec-edge runs one server; its configuration is the file that opendsec
// init writes as edge.json.
package main

import (
	"os"

	"github.com/kernflux/opendsec/internal/program"
	"github.com/kernflux/opendsec/internal/program/runedge"
)

func main() { os.Exit(program.Main(&runedge.Server{}, os.Args[1:])) }
