// Opendsec-apiserver runs one server; its configuration is the file that opendsec
// init writes as apiserver.json.
package main

import (
	"os"

	"github.com/kernflux/opendsec/internal/program"
)

func main() { os.Exit(program.Main(&program.APIServer{}, os.Args[1:])) }
