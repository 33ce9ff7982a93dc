// Opendsec-edge runs one server; its configuration is the file that opendsec
// init writes as edge.json.
package main

import (
	"os"

	"github.com/kernflux/opendsec/internal/program"
)

func main() { os.Exit(program.Main(&program.Edge{}, os.Args[1:])) }
