package debian

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kernflux/opendsec/internal/fault"
)

// keyring holds Debian's archive keys, on the machine and in the image.
const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// entry is one source of packages.
type entry struct {
	uris, suites, components []string
	signedBy                 string
}

// machineSources returns Debian's own sources of the machine in deb822 form:
// those of its release that are signed with Debian's keys. Other vendors'
// sources are left out: their packages and keys are not in the image. A
// machine without any gets deb.debian.org.
func machineSources(etcApt string, r release) (string, error) {
	var all []entry
	files, err := filepath.Glob(filepath.Join(etcApt, "sources.list.d", "*"))
	if err != nil {
		return "", fmt.Errorf("list apt's sources: %w", err)
	}
	for _, file := range append([]string{filepath.Join(etcApt, "sources.list")}, files...) {
		b, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("read apt's sources: %w", err)
		}
		switch filepath.Ext(file) {
		case ".list":
			all = append(all, parseOneLine(string(b))...)
		case ".sources":
			all = append(all, parseDeb822(string(b))...)
		}
	}
	var out strings.Builder
	for _, e := range all {
		if r.debian && e.isDebian(r) {
			out.WriteString(e.String())
		}
	}
	if out.Len() > 0 {
		return out.String(), nil
	}
	if _, err := os.Stat(keyring); err != nil {
		return "", fault.New(fault.Unavailable, "the machine has no Debian package sources and no keys of Debian's archive; run: apt-get install debian-archive-keyring")
	}
	for _, e := range []entry{
		{uris: []string{"http://deb.debian.org/debian"}, suites: []string{r.suite, r.suite + "-updates"}},
		{uris: []string{"http://deb.debian.org/debian-security"}, suites: []string{r.suite + "-security"}},
	} {
		e.components, e.signedBy = []string{"main"}, keyring
		out.WriteString(e.String())
	}
	return out.String(), nil
}

// isDebian reports whether a source is the distribution's own, for its release.
func (e entry) isDebian(r release) bool {
	own := []string{r.suite, r.suite + "-updates", r.suite + "-security", r.suite + "/updates"}
	for _, s := range e.suites {
		if !slices.Contains(own, s) {
			return false
		}
	}
	for _, u := range e.uris {
		if strings.HasPrefix(u, "cdrom:") {
			return false
		}
	}
	if !slices.Contains(e.components, "main") {
		return false
	}
	return e.signedBy == "" || strings.Contains(e.signedBy, "debian-archive")
}

func (e entry) String() string {
	s := fmt.Sprintf("Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\n",
		strings.Join(e.uris, " "), strings.Join(e.suites, " "), strings.Join(e.components, " "))
	if e.signedBy != "" {
		s += "Signed-By: " + e.signedBy + "\n"
	}
	return s + "\n"
}

// parseOneLine reads "deb [options] URI SUITE COMPONENT…" lines.
func parseOneLine(text string) []entry {
	var all []entry
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb ")
		if !ok {
			continue
		}
		var e entry
		if rest = strings.TrimSpace(rest); strings.HasPrefix(rest, "[") {
			options, after, _ := strings.Cut(rest[1:], "]")
			rest = after
			for _, o := range strings.Fields(options) {
				if v, ok := strings.CutPrefix(o, "signed-by="); ok {
					e.signedBy = v
				}
			}
		}
		if f := strings.Fields(rest); len(f) >= 3 {
			e.uris, e.suites, e.components = f[:1], f[1:2], f[2:]
			all = append(all, e)
		}
	}
	return all
}

// parseDeb822 reads paragraphs of "Field: value" lines.
func parseDeb822(text string) []entry {
	var all []entry
	fields := map[string]string{}
	last := ""
	end := func() {
		e := entry{
			uris: strings.Fields(fields["uris"]), suites: strings.Fields(fields["suites"]),
			components: strings.Fields(fields["components"]), signedBy: fields["signed-by"],
		}
		deb := slices.Contains(strings.Fields(fields["types"]), "deb")
		if deb && len(e.uris) > 0 && len(e.suites) > 0 && strings.ToLower(orDefault(fields["enabled"], "yes")) != "no" {
			all = append(all, e)
		}
		fields = map[string]string{}
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			end()
		case line[0] == ' ' || line[0] == '\t':
			fields[last] += "\n" + line
		default:
			key, value, _ := strings.Cut(line, ":")
			last = strings.ToLower(key)
			fields[last] = strings.TrimSpace(value)
		}
	}
	end()
	return all
}

func orDefault(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// passed are the settings of apt that the machine needs to reach its mirror.
var passed = []string{
	"Acquire::http::", "Acquire::https::", "Acquire::ftp::", "Acquire::Check-", "Acquire::Retries",
	"Acquire::ForceIPv", "Acquire::Max-", "Acquire::Min-",
}

// machineAptConf returns the machine's settings of apt that concern the way to
// the mirror. A machine without apt has none.
func machineAptConf(ctx context.Context) []byte {
	dump, err := exec.CommandContext(ctx, "apt-config", "dump").Output()
	if err != nil {
		return nil
	}
	return filterAptConf(string(dump), passed)
}

func filterAptConf(dump string, prefixes []string) []byte {
	var out strings.Builder
	for line := range strings.Lines(dump) {
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(line, p) }) {
			out.WriteString(line)
		}
	}
	return []byte(out.String())
}
