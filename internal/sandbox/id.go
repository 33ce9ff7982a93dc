package sandbox

import (
	"crypto/rand"
	"fmt"
	"regexp"
	"strings"
)

// ID names a sandbox for its whole life: "sb-" and 12 of [a-z0-9]. It is also
// the default host name.
type ID string

const idAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789"

// NewID returns a fresh random ID (62 bits of chance).
func NewID() ID {
	b := make([]byte, 0, 15)
	b = append(b, "sb-"...)
	buf := make([]byte, 32)
	for {
		rand.Read(buf)
		for _, c := range buf {
			// 252 is the largest multiple of 36 in a byte; more would favour some letters.
			if c >= 252 {
				continue
			}
			b = append(b, idAlphabet[c%36])
			if len(b) == 15 {
				return ID(b)
			}
		}
	}
}

var idForm = regexp.MustCompile(`^sb-[a-z0-9]{12}$`)

// ParseID checks that s has the form of an ID.
func ParseID(s string) (ID, error) {
	if !idForm.MatchString(s) {
		return "", fmt.Errorf("sandbox id %q: want \"sb-\" and 12 of [a-z0-9]", s)
	}
	return ID(s), nil
}

// Project is a project's path, such as "root/demo".
type Project string

var projectForm = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}(/[a-z0-9][a-z0-9._-]{0,62}){0,7}$`)

// ParseProject checks that s has the form of a project's path: up to 8
// elements of [a-z0-9._-], up to 63 characters each.
func ParseProject(s string) (Project, error) {
	if !projectForm.MatchString(s) {
		return "", fmt.Errorf("project %q: want elements of [a-z0-9._-] with / between, such as root/demo", s)
	}
	return Project(s), nil
}

// Contains reports whether q is p or lies below it.
func (p Project) Contains(q Project) bool {
	return p == q || strings.HasPrefix(string(q), string(p)+"/")
}

// Parent returns the project above p, "" for the topmost.
func (p Project) Parent() Project {
	i := strings.LastIndexByte(string(p), '/')
	if i < 0 {
		return ""
	}
	return p[:i]
}

// Lineage returns p and all projects above it, p first.
func (p Project) Lineage() []Project {
	var all []Project
	for ; p != ""; p = p.Parent() {
		all = append(all, p)
	}
	return all
}

// ImageName is an image's full name: project, repository and tag.
type ImageName struct {
	Project Project
	Repo    string
	Tag     string
}

var (
	repoForm = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
	tagForm  = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
)

// ParseImageName splits "project/name:tag"; the tag defaults to "latest".
func ParseImageName(s string) (ImageName, error) {
	path, tag := s, "latest"
	if i := strings.LastIndexByte(s, ':'); i >= 0 {
		path, tag = s[:i], s[i+1:]
	}
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return ImageName{}, fmt.Errorf("image %q: want project/name:tag, such as root/py:3.12", s)
	}
	p, err := ParseProject(path[:i])
	if err != nil {
		return ImageName{}, fmt.Errorf("image %q: %w", s, err)
	}
	n := ImageName{Project: p, Repo: path[i+1:], Tag: tag}
	if !repoForm.MatchString(n.Repo) {
		return ImageName{}, fmt.Errorf("image %q: the name %q must be up to 63 of [a-z0-9._-]", s, n.Repo)
	}
	if !tagForm.MatchString(n.Tag) {
		return ImageName{}, fmt.Errorf("image %q: the tag %q must be up to 128 of [A-Za-z0-9._-]", s, n.Tag)
	}
	return n, nil
}

// String returns "project/name:tag".
func (n ImageName) String() string {
	return string(n.Project) + "/" + n.Repo + ":" + n.Tag
}
